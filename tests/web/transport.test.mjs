import assert from "node:assert/strict";
import { test } from "node:test";

import { newAnswer } from "../../web/answer.js";
import * as transport from "../../web/transport.js";

const { backoffMs, createEvent, FIRST_LINK, nextLink, readEvent, resumeEvent } = transport;

const phases = (...events) => events.reduce((link, event) => nextLink(link, event), FIRST_LINK);

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

test("a request holds the conversation and only the settings that are set", () => {
  const messages = [
    { id: "1", role: "user", text: "Hi" },
    { ...newAnswer("2", 0), status: "failed" },
    { id: "3", role: "user", text: "Again" },
  ];
  const settings = { temperature: 0, top_p: "", seed: 7, instructions: "" };
  assert.deepEqual(createEvent({ model: "m", messages, settings, id: "4" }), {
    type: "response.create",
    stream_id: "4",
    request_id: "4",
    model: "m",
    store: false,
    input: [
      { type: "message", role: "user", content: "Hi" },
      { type: "message", role: "user", content: "Again" },
    ],
    temperature: 0,
    seed: 7,
  });
});

test("an answer is gone on with by the name it was asked by, after its last event", () => {
  const begun = { type: "response.resume", response_id: "resp_4", starting_after: 7, stream_id: "4" };
  assert.deepEqual(resumeEvent({ ...newAnswer("4", 0), number: 7 }), begun);
  assert.equal(resumeEvent(newAnswer("4", 0)).starting_after, -1);
});

test("what is no event becomes an error event", () => {
  for (const data of ["", "{", "null", "3", "[]", '{"type": 3}', '{"a": 1}']) assert.equal(readEvent(data).type, "error", data);
  assert.deepEqual(readEvent('{"type": "x"}'), { type: "x" });
});
