// Owns the protocol: what is sent in OpenAI's Responses WebSocket mode, and when to connect. Knows
// no DOM, and nothing of how events make an answer. The pure part is nextLink, (link, event) => new
// link; Link is the thin shell around it. Invariant: at most one socket and one timer.

export const SUBPROTOCOL = "realtime"; // offered beside the key: a browser wants one to be chosen
const KEY_PREFIX = "openai-insecure-api-key.";
const PROBE_MS = 1000; // between looks at a server that is loading
const REQUEST_TIMEOUT_MS = 10_000;
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

/** The server's id of the response that was asked for with this `request_id`. */
const responseId = (id) => `resp_${id}`;

/**
 * The `response.create` event for a conversation. Empty settings are left to the server. The
 * answer's id names the lane, and the response, too: so it can be gone on with, or ended, before
 * any event of it came.
 */
export function createEvent({ model, messages, settings, id }) {
  const chosen = Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== ""));
  const input = messages
    .filter((message) => message.text)
    .map(({ role, text }) => ({ type: "message", role, content: text }));
  // No `on_disconnect`: an answer whose reader is cut off then goes on for the server's resume
  // window, so that who comes back from a dead spot, a locked phone or a reload finds it written.
  // To pause it would be kinder to the server when a tab is closed for good, but nobody can tell
  // that from a reload. A server without a window would refuse the word.
  const names = { stream_id: id, request_id: id };
  return { type: "response.create", ...names, model, store: false, input, ...chosen };
}

/** The event that goes on with an answer after the last event of it that came. */
export const resumeEvent = ({ id, number }) => ({
  type: "response.resume",
  response_id: responseId(id),
  starting_after: number,
  stream_id: id,
});

const lost = (detail, { status }) => ({
  type: "lost",
  detail: detail || `the server answers ${status}`,
});

/** Keeps a connection to `origin`; calls onLink(link) at each change and onEvent(event). */
export class Link {
  #socket = null;
  #timer = 0;
  #round = 0; // answers of an older round of requests are dropped
  #abandoned = new Set(); // ids of answers to end

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

  /** Ends an answer that isn't read on this connection, as soon as there is one. */
  abandon(id) {
    this.#abandoned.add(id);
    this.#endAbandoned();
  }

  #endAbandoned() {
    if (this.now.phase !== "ready") return;
    for (const id of this.#abandoned) {
      this.#abandoned.delete(id);
      this.#fetch(`/v1/requests/${responseId(id)}`, "DELETE").catch(() => this.#abandoned.add(id));
    }
  }

  #step(event) {
    this.now = nextLink(this.now, event);
    this.onLink(this.now);
    this.#endAbandoned();
  }

  #fetch(path, method = "GET") {
    const headers = this.key ? { Authorization: `Bearer ${this.key}` } : {};
    const signal = AbortSignal.timeout(REQUEST_TIMEOUT_MS);
    return fetch(this.origin + path, { method, headers, signal });
  }

  async #probe() {
    try {
      const health = await this.#fetch("/health");
      const state = await health.json().catch(() => ({}));
      const detail = state.detail || state.error?.message || state.status || "";
      if (health.status === 503 && state.status === "loading") return { type: "loading", detail };
      if (!health.ok) return lost(detail, health);
      const models = await this.#fetch("/v1/models");
      const body = await models.json().catch(() => ({}));
      const refusal = body.error?.message || "";
      if (models.status === 401) return { type: "locked", detail: "Wrong key" };
      if (models.status === 403) return { type: "locked", detail: refusal };
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
      this.#step({ type: "lost", detail: reason || "The connection was lost" });
      this.#retry();
    };
  }

  #retry() {
    this.#timer = setTimeout(() => this.connect(), backoffMs(this.now.attempt));
  }
}
