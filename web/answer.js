// Owns one answer: how the server's events, the user's stop and cuts of the connection make it,
// and its figures. Pure: (answer, event) => new answer. Knows no socket and no DOM. Invariant: each
// event counts once, however often it comes: what isn't above `number`, the last one's, is old.

export const STATUSES = Object.freeze([
  "waiting", // for its first text
  "streaming",
  "done",
  "stopped",
  "length",
  "failed",
  "dropped", // the connection was lost, and the server has the rest no more
  "unsent", // the connection was lost, and the server has never seen it: to be asked for again
]);

/** An answer before its first event. Times are milliseconds of one clock that outlives a reload. */
export function newAnswer(id, sentMs) {
  const nothing = { text: "", error: "", usage: null, firstMs: 0, lastMs: 0, number: -1 };
  const flags = { isAway: false, wasCut: false, isStopping: false, isRepeat: false };
  return { id, role: "assistant", status: "waiting", sentMs, ...nothing, ...flags };
}

export const isOpen = (answer) => answer?.status === "waiting" || answer?.status === "streaming";

/** The answer after an event of the server, a `cut` of the connection, or a user's `stop`. */
export function nextAnswer(answer, event, nowMs) {
  if (!isOpen(answer) || event.sequence_number <= answer.number) return answer;
  switch (event.type) {
    case "cut":
      // Whether the cancel got through isn't known: there is nothing to come back for.
      if (answer.isStopping) return { ...answer, status: "stopped" };
      return answer.isAway ? answer : { ...answer, isAway: true, wasCut: true };
    case "stop": // its last event brings the figures, unless nothing can come
      return answer.isAway ? { ...answer, status: "stopped" } : { ...answer, isStopping: true };
    case "error":
      return { ...answer, ...refusal(answer, event) };
    default:
      return afterResponseEvent(answer, event, nowMs);
  }
}

function afterResponseEvent(answer, event, nowMs) {
  const number = event.sequence_number ?? answer.number;
  const heard = number === answer.number ? answer : { ...answer, number, isAway: false };
  switch (event.type) {
    case "response.output_text.delta": {
      if (!event.delta) return heard;
      const times = { firstMs: answer.firstMs || nowMs, lastMs: nowMs };
      return { ...heard, status: "streaming", text: answer.text + event.delta, ...times };
    }
    case "response.completed":
    case "response.incomplete":
    case "response.failed":
      return { ...heard, ...outcome(event), usage: event.response.usage ?? null };
    default:
      return heard; // created, in_progress, item and part events say nothing that the page shows
  }
}

/** What an error event means, which is no event of a response: the server has none, or no more. */
function refusal({ isAway, isStopping, number, isRepeat }, event) {
  if (isStopping) return { status: "stopped" }; // also where another tab has it by now
  if (!isAway) return { status: "failed", error: errorText(event) };
  return { status: number < 0 && !isRepeat ? "unsent" : "dropped" };
}

function outcome({ type, response }) {
  if (type === "response.completed") return { status: "done" };
  if (type === "response.failed") return { status: "failed", error: errorText(response) };
  const reachedLimit = response.incomplete_details?.reason === "max_output_tokens";
  return { status: reachedLimit ? "length" : "stopped" };
}

/** What an error event, or a failed response, says went wrong. */
export function errorText({ error }) {
  const text = error?.message || error?.code || "the server reported an error without saying which";
  return error?.param && !text.includes(error.param) ? `${error.param}: ${text}` : text;
}

/** An answer's figures: tokens, tokens/s, time to first token, share of the prompt in the cache. */
export function answerStats({ usage, sentMs, firstMs, lastMs, wasCut }) {
  const stats = [];
  if (usage) stats.push(`${usage.output_tokens} token${usage.output_tokens === 1 ? "" : "s"}`);
  // The first token's time is the prompt's: the rate counts the tokens after it. When those came
  // that were written during a cut, nobody saw.
  const seconds = (lastMs - firstMs) / 1000;
  if (usage?.output_tokens > 1 && seconds > 0 && !wasCut) {
    stats.push(`${((usage.output_tokens - 1) / seconds).toFixed(1)} tok/s`);
  }
  if (firstMs) stats.push(`${formatMs(firstMs - sentMs)} to first token`);
  const cached = usage?.input_tokens_details?.cached_tokens;
  if (cached) stats.push(`${Math.floor((100 * cached) / usage.input_tokens)} % cached`);
  return stats;
}

const formatMs = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
