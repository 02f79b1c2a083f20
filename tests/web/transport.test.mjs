import assert from "node:assert/strict";
import { test } from "node:test";

import * as transport from "../../web/transport.js";

const { answerStats, backoffMs, createEvent, FIRST_LINK, newAnswer, nextAnswer, nextLink, readEvent } = transport;

const phases = (...events) => events.reduce((link, event) => nextLink(link, event), FIRST_LINK);
const play = (...events) => events.reduce((answer, [event, ms]) => nextAnswer(answer, event, ms), newAnswer("a", 1000));
const delta = (text) => ({ type: "response.output_text.delta", delta: text });

test("a connection goes from probing to ready", () => {
  const link = phases({ type: "probe" }, { type: "found", model: "m" }, { type: "opened" });
  assert.deepEqual([link.phase, link.model, link.attempt], ["ready", "m", 0]);
});

test("each failure in a row counts, success and loading start over", () => {
  const lost = { type: "lost", detail: "gone" };
  assert.equal(phases(lost, { type: "probe" }, lost).attempt, 2);
  assert.equal(phases(lost, lost, { type: "loading", detail: "" }).attempt, 0);
  assert.equal(phases(lost, lost, { type: "found", model: "m" }, { type: "opened" }).attempt, 0);
  assert.throws(() => phases({ type: "nonsense" }), TypeError);
});

test("asking a loading server again shows no other state", () => {
  const link = phases({ type: "loading", detail: "40 %" }, { type: "probe" });
  assert.deepEqual([link.phase, link.detail], ["loading", "40 %"]);
});

test("the wait doubles up to ten seconds and jitter only shortens it", () => {
  assert.deepEqual([1, 2, 3, 4, 5, 6, 60].map((n) => backoffMs(n, 0)), [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
  assert.equal(backoffMs(1, 1), 400);
});

test("an answer grows by its deltas and knows its times", () => {
  const usage = { input_tokens: 3, output_tokens: 5, input_tokens_details: { cached_tokens: 2 } };
  const answer = play(
    [{ type: "response.created", response: { id: "r" } }, 1050],
    [delta(""), 1100],
    [delta("Hel"), 1250],
    [delta("lo"), 3250],
    [{ type: "response.completed", response: { usage } }, 3300],
  );
  assert.deepEqual([answer.text, answer.status], ["Hello", "done"]);
  assert.deepEqual(answerStats(answer), ["5 tokens", "2.0 tok/s", "250 ms to first token", "66 % cached"]);
});

test("how a response ended is told apart", () => {
  const incomplete = (reason) => ({ type: "response.incomplete", response: { incomplete_details: reason && { reason } } });
  assert.equal(play([incomplete("max_output_tokens"), 1]).status, "length");
  assert.equal(play([incomplete(null), 1]).status, "stopped");
  assert.equal(play([{ type: "dropped" }, 1]).status, "dropped");
  const failed = play([{ type: "response.failed", response: { error: { code: "server_error", message: "no" } } }, 1]);
  assert.deepEqual([failed.status, failed.error], ["failed", "no"]);
  const refused = play([{ type: "error", error: { message: "no", param: "seed" } }, 1]);
  assert.deepEqual([refused.status, refused.error], ["failed", "seed: no"]);
  assert.equal(play([{ type: "error", error: { message: "seed: no", param: "seed" } }, 1]).error, "seed: no");
});

test("an answer that ended never changes, and unknown events change nothing", () => {
  const ended = play([delta("x"), 1], [{ type: "dropped" }, 2]);
  assert.equal(nextAnswer(ended, delta("y"), 3), ended);
  const open = newAnswer("a", 0);
  assert.equal(nextAnswer(open, { type: "response.in_progress" }, 1), open);
});

test("figures that aren't known aren't shown", () => {
  assert.deepEqual(answerStats(newAnswer("a", 0)), []);
  const one = play([delta("x"), 2500], [{ type: "response.completed", response: { usage: { output_tokens: 1 } } }, 2600]);
  assert.deepEqual(answerStats(one), ["1 token", "1.50 s to first token"]);
});

test("a request holds the conversation and only the settings that are set", () => {
  const messages = [
    { id: "1", role: "user", text: "Hi" },
    { ...newAnswer("2", 0), status: "failed" },
    { id: "3", role: "user", text: "Again" },
  ];
  const settings = { temperature: 0, top_p: "", seed: 7, instructions: "" };
  assert.deepEqual(createEvent({ model: "m", messages, settings, streamId: "4" }), {
    type: "response.create",
    stream_id: "4",
    model: "m",
    store: false,
    on_disconnect: "abort",
    input: [
      { type: "message", role: "user", content: "Hi" },
      { type: "message", role: "user", content: "Again" },
    ],
    temperature: 0,
    seed: 7,
  });
});

test("what is no event becomes an error event", () => {
  for (const data of ["", "{", "null", "3", "[]", '{"type": 3}', '{"a": 1}']) assert.equal(readEvent(data).type, "error", data);
  assert.deepEqual(readEvent('{"type": "x"}'), { type: "x" });
});
