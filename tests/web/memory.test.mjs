import assert from "node:assert/strict";
import { test } from "node:test";

import { newAnswer, nextAnswer } from "../../web/answer.js";
import { keep, keepMessages, newest, readMessage, recall, recallMessages } from "../../web/memory.js";

const store = (text) => {
  globalThis.sessionStorage = { getItem: () => text, setItem: (name, value) => (text = value) };
};
const user = (id, text) => ({ id, role: "user", text });

test("a conversation and its open answer come back as they were", () => {
  store(null);
  const event = { type: "response.output_text.delta", delta: "Hel", sequence_number: 4 };
  const messages = [user("1", "Hi"), nextAnswer(newAnswer("2", 1000), event, 1200)];
  keepMessages(messages);
  assert.deepEqual(recallMessages(), messages);
});

test("whatever is stored, messages come back", () => {
  const broken = ["", "{", "null", "3", '"x"', "{}", '{"length": 2}', "[null, 3, [], {}]",
    '[{"id": 1, "role": "user", "text": "x"}]', '[{"id": "1", "role": "system", "text": "x"}]',
    '[{"id": "1", "role": "user", "text": {}}]'];
  for (const text of [null, ...broken]) {
    store(text);
    assert.deepEqual(recallMessages(), [], text);
  }
  store('[3, {"id": "1", "role": "user", "text": "Hi", "x": 1}, {"id": "1", "role": "user", "text": "Hi"}]');
  assert.deepEqual(recallMessages(), [user("1", "Hi")]);
});

test("fields that are missing or of another type are those of a new answer", () => {
  const stored = { id: "2", role: "assistant", text: "", status: "done", sentMs: "x", usage: 3, isAway: null, y: 1 };
  assert.deepEqual(readMessage(stored), { ...newAnswer("2", 0), status: "done" });
});

test("what can't be gone on with is dropped", () => {
  const of = (fields) => readMessage({ id: "2", role: "assistant", text: "Hel", ...fields }).status;
  assert.equal(of({ status: "streaming", number: 3 }), "streaming");
  assert.equal(of({ status: "streaming" }), "dropped");
  assert.equal(of({ status: "waiting", text: "" }), "waiting");
  assert.equal(of({ status: "done" }), "done");
  assert.equal(of({ status: "toString" }), "dropped");
});

test("of a conversation that is too long, the newest turns are kept", () => {
  const messages = [user("1", "a".repeat(100)), newAnswer("2", 0), user("3", "b"), newAnswer("4", 0)];
  const size = (list) => JSON.stringify(list).length;
  assert.deepEqual(newest(messages, size(messages)), messages);
  assert.deepEqual(newest(messages, size(messages) - 1 - 100), messages.slice(2));
  assert.deepEqual(newest(messages, 10), []);
});

test("a value of another type than expected, or no storage at all, is as nothing stored", () => {
  for (const text of ["{", "3", "null", "[]", "{}"]) {
    store(text);
    assert.equal(recall("sessionStorage", "draft", ""), "");
  }
  globalThis.sessionStorage = undefined;
  assert.equal(recall("sessionStorage", "draft", "x"), "x");
  keep("sessionStorage", "draft", "y");
});
