import assert from "node:assert/strict";
import { test } from "node:test";

import { answerStats, isOpen, newAnswer, nextAnswer } from "../../web/answer.js";

const play = (...events) => events.reduce((answer, [event, ms]) => nextAnswer(answer, event, ms), newAnswer("a", 1000));
const after = (answer, ...events) => events.reduce((now, event) => nextAnswer(now, event, 9000), answer);
const delta = (text, number) => ({ type: "response.output_text.delta", delta: text, sequence_number: number });
const created = { type: "response.created", response: { id: "resp_a" }, sequence_number: 0 };
const refused = { type: "error", error: { code: "request_not_found", message: "no request here" } };
const CUT = { type: "cut" };
const STOP = { type: "stop" };

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
  const failed = play([{ type: "response.failed", response: { error: { code: "server_error", message: "no" } } }, 1]);
  assert.deepEqual([failed.status, failed.error], ["failed", "no"]);
  const refusal = play([{ type: "error", error: { message: "no", param: "seed" } }, 1]);
  assert.deepEqual([refusal.status, refusal.error], ["failed", "seed: no"]);
  assert.equal(play([{ type: "error", error: { message: "seed: no", param: "seed" } }, 1]).error, "seed: no");
});

test("an answer that ended never changes, and unknown events change nothing", () => {
  const ended = play([delta("x"), 1], [{ type: "error" }, 2]);
  assert.equal(nextAnswer(ended, delta("y"), 3), ended);
  const open = newAnswer("a", 0);
  assert.equal(nextAnswer(open, { type: "response.in_progress" }, 1), open);
});

test("figures that aren't known aren't shown", () => {
  assert.deepEqual(answerStats(newAnswer("a", 0)), []);
  const one = play([delta("x"), 2500], [{ type: "response.completed", response: { usage: { output_tokens: 1 } } }, 2600]);
  assert.deepEqual(answerStats(one), ["1 token", "1.50 s to first token"]);
});

test("an event counts once, however often it comes", () => {
  const once = after(newAnswer("a", 0), created, delta("Hel", 1), delta("lo", 2));
  assert.equal(after(once, created, delta("Hel", 1), delta("lo", 2)), once);
  assert.deepEqual([once.text, once.number], ["Hello", 2]);
  const ended = after(once, { type: "response.completed", response: {}, sequence_number: 3 });
  assert.equal(after(ended, delta("lo", 2), delta("!", 4)), ended);
});

test("a cut leaves an answer open until something of it comes again", () => {
  const away = after(newAnswer("a", 0), created, delta("Hel", 1), CUT);
  assert.deepEqual([away.status, away.isAway, away.number], ["streaming", true, 1]);
  assert.equal(after(away, CUT), away);
  assert.equal(after(away, delta("Hel", 1)), away);
  const back = after(away, delta("lo", 2));
  assert.deepEqual([back.text, back.isAway, isOpen(back)], ["Hello", false, true]);
});

test("what the server has no more is dropped, and its text stays", () => {
  for (const code of ["request_not_found", "events_dropped", "not_resumable"]) {
    const answer = after(newAnswer("a", 0), created, delta("Hel", 1), CUT, { ...refused, error: { code } });
    assert.deepEqual([answer.status, answer.text, answer.error], ["dropped", "Hel", ""]);
  }
});

test("what the server has never seen is to be asked again, once", () => {
  assert.equal(after(newAnswer("a", 0), CUT, refused).status, "unsent");
  assert.equal(after({ ...newAnswer("a", 0), isRepeat: true }, CUT, refused).status, "dropped");
  assert.equal(after(newAnswer("a", 0), created, CUT, refused).status, "dropped");
});

test("a stop waits for the last event, unless none can come", () => {
  const incomplete = { type: "response.incomplete", response: { usage: { output_tokens: 2 } }, sequence_number: 2 };
  const stopping = after(newAnswer("a", 0), created, delta("Hel", 1), STOP);
  assert.equal(isOpen(stopping), true);
  const ended = after(stopping, incomplete);
  assert.deepEqual([ended.status, ended.usage.output_tokens], ["stopped", 2]);
  assert.equal(after(stopping, CUT).status, "stopped");
  assert.equal(after(stopping, refused).status, "stopped");
  const away = after(newAnswer("a", 0), created, delta("Hel", 1), CUT);
  assert.deepEqual([after(away, STOP).status, after(away, STOP).text], ["stopped", "Hel"]);
});

test("no rate is shown of tokens that came while nobody saw", () => {
  const usage = { output_tokens: 5 };
  const answer = play(
    [delta("a", 0), 1250], [CUT, 1300], [delta("b", 1), 61_000],
    [{ type: "response.completed", response: { usage }, sequence_number: 2 }, 61_000],
  );
  assert.deepEqual(answerStats(answer), ["5 tokens", "250 ms to first token"]);
});
