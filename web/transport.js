// Owns the protocol: OpenAI's Responses WebSocket mode, how its events make an answer, and when to
// connect. Knows no DOM. The pure part is nextLink and nextAnswer, (value, event) => new value;
// Link is the thin shell around them. Invariant: at most one socket and one timer.

export const SUBPROTOCOL = "realtime"; // offered beside the key: a browser wants one to be chosen
const KEY_PREFIX = "openai-insecure-api-key.";
const PROBE_MS = 1000; // between looks at a server that is loading
const PROBE_TIMEOUT_MS = 10_000;
const LONGEST_WAIT_MS = 10_000;

/** Wait before attempt `attempt` (1, 2, …): doubled each time, up to a fifth less by chance. */
export function backoffMs(attempt, random = Math.random()) {
  return Math.min(500 * 2 ** (attempt - 1), LONGEST_WAIT_MS) * (1 - 0.2 * random);
}

export const FIRST_LINK = Object.freeze({ phase: "probing", attempt: 0, detail: "", model: "" });

/**
 * Phases: probing (asking /health, then /v1/models) → opening (the WebSocket) → ready; besides:
 * loading (the model is), locked (a key is needed), waiting (failed `attempt` times in a row).
 */
export function nextLink(link, event) {
  switch (event.type) {
    case "probe": // a loading server is asked again and again: that shows no other state
      return link.phase === "loading" ? link : { ...link, phase: "probing" };
    case "loading":
      return { ...link, phase: "loading", detail: event.detail, attempt: 0 };
    case "locked":
      return { ...link, phase: "locked", detail: event.detail };
    case "found":
      return { ...link, phase: "opening", model: event.model };
    case "opened":
      return { ...link, phase: "ready", attempt: 0, detail: "" };
    case "lost":
      return { ...link, phase: "waiting", attempt: link.attempt + 1, detail: event.detail };
    default:
      throw new TypeError(`unknown link event ${event.type}`);
  }
}

/** A message from the socket as an event; what can't be read becomes an error event. */
export function readEvent(data) {
  try {
    const event = JSON.parse(data);
    if (typeof event?.type === "string") return event;
  } catch {
    // falls through: reported below
  }
  return { type: "error", error: { message: "the server sent something that is not an event" } };
}

/** The `response.create` event for a conversation. Empty settings are left to the server. */
export function createEvent({ model, messages, settings, streamId }) {
  const chosen = Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== ""));
  const input = messages
    .filter((message) => message.text)
    .map(({ role, text }) => ({ type: "message", role, content: text }));
  // The page does not come back for an answer: nobody is to write one for it.
  const kept = { store: false, on_disconnect: "abort" };
  return { type: "response.create", stream_id: streamId, model, ...kept, input, ...chosen };
}

/** An answer before its first event. Times are milliseconds of one monotonic clock. */
export function newAnswer(id, sentMs) {
  const nothing = { text: "", error: "", usage: null, firstMs: 0, lastMs: 0 };
  return { id, role: "assistant", status: "waiting", sentMs, ...nothing };
}

export const isOpen = (answer) => answer?.status === "waiting" || answer?.status === "streaming";

/** The answer after an event: waiting → streaming → done|stopped|length|failed|dropped. */
export function nextAnswer(answer, event, nowMs) {
  if (!isOpen(answer)) return answer;
  switch (event.type) {
    case "response.output_text.delta": {
      if (!event.delta) return answer;
      const times = { firstMs: answer.firstMs || nowMs, lastMs: nowMs };
      return { ...answer, status: "streaming", text: answer.text + event.delta, ...times };
    }
    case "response.completed":
    case "response.incomplete":
    case "response.failed":
      return { ...answer, ...outcome(event), usage: event.response.usage ?? null };
    case "error":
      return { ...answer, status: "failed", error: errorText(event) };
    case "dropped":
      return { ...answer, status: "dropped" };
    default:
      return answer; // created, in_progress, item and part events say nothing that the page shows
  }
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
export function answerStats({ usage, sentMs, firstMs, lastMs }) {
  const stats = [];
  if (usage) stats.push(`${usage.output_tokens} token${usage.output_tokens === 1 ? "" : "s"}`);
  // The first token's time is the prompt's: the rate counts the tokens after it.
  const seconds = (lastMs - firstMs) / 1000;
  if (usage?.output_tokens > 1 && seconds > 0) {
    stats.push(`${((usage.output_tokens - 1) / seconds).toFixed(1)} tok/s`);
  }
  if (firstMs) stats.push(`${formatMs(firstMs - sentMs)} to first token`);
  const cached = usage?.input_tokens_details?.cached_tokens;
  if (cached) stats.push(`${Math.floor((100 * cached) / usage.input_tokens)} % cached`);
  return stats;
}

const formatMs = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

const lost = (detail, { status }) => ({
  type: "lost",
  detail: detail || `the server answers ${status}`,
});

/** Keeps a connection to `origin`; calls onLink(link) at each change and onEvent(event). */
export class Link {
  #socket = null;
  #timer = 0;
  #round = 0; // answers of an older round of requests are dropped

  constructor({ origin, key, onLink, onEvent }) {
    Object.assign(this, { origin, key, onLink, onEvent, now: FIRST_LINK });
  }

  /** (Re)connects now, whatever was going on. */
  async connect() {
    clearTimeout(this.#timer);
    const round = ++this.#round;
    const old = this.#socket;
    this.#socket = null;
    old?.close();
    this.#step({ type: "probe" });
    const event = await this.#probe();
    if (round !== this.#round) return;
    this.#step(event);
    if (event.type === "found") this.#open();
    if (event.type === "loading") this.#timer = setTimeout(() => this.connect(), PROBE_MS);
    if (event.type === "lost") this.#retry();
  }

  /** Sends one client event; false if there is no connection to send it on. */
  send(event) {
    if (this.now.phase !== "ready") return false;
    this.#socket.send(JSON.stringify(event));
    return true;
  }

  #step(event) {
    this.now = nextLink(this.now, event);
    this.onLink(this.now);
  }

  async #probe() {
    const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    const options = { headers, signal: AbortSignal.timeout(PROBE_TIMEOUT_MS) };
    try {
      const health = await fetch(`${this.origin}/health`, options);
      const state = await health.json().catch(() => ({}));
      const detail = state.detail || state.error?.message || state.status || "";
      if (health.status === 503 && state.status === "loading") return { type: "loading", detail };
      if (!health.ok) return lost(detail, health);
      const models = await fetch(`${this.origin}/v1/models`, options);
      const body = await models.json().catch(() => ({}));
      const refusal = body.error?.message || "";
      if ([401, 403].includes(models.status)) return { type: "locked", detail: refusal };
      if (!models.ok) return lost(refusal, models);
      return { type: "found", model: body.data?.[0]?.id ?? "" };
    } catch {
      return { type: "lost", detail: "The server can't be reached" };
    }
  }

  #open() {
    const url = `${this.origin.replace(/^http/, "ws")}/v1/responses`;
    const protocols = this.key ? [SUBPROTOCOL, KEY_PREFIX + this.key] : [];
    const socket = new WebSocket(url, protocols);
    this.#socket = socket;
    socket.onopen = () => socket === this.#socket && this.#step({ type: "opened" });
    socket.onmessage = ({ data }) => socket === this.#socket && this.onEvent(readEvent(data));
    socket.onclose = ({ reason }) => {
      if (socket !== this.#socket) return;
      this.#socket = null;
      this.#step({ type: "lost", detail: reason || "the connection was lost" });
      this.#retry();
    };
  }

  #retry() {
    this.#timer = setTimeout(() => this.connect(), backoffMs(this.now.attempt));
  }
}
