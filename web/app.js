// Owns the page: one state object, render() after each change (once a frame), and what buttons and keys
// do. Knows the protocol only as transport.js. Invariant: the state is the only truth; the DOM is drawn
// from it and never read back, except for what is being typed, which goes into the state at once.

import { copyText, h } from "./dom.js";
import { drawMarkdown } from "./draw.js";
import { answerStats, createEvent, errorText, FIRST_LINK, isOpen, Link, newAnswer, nextAnswer } from "./transport.js";

const NO_SETTINGS = { instructions: "", temperature: "", top_p: "", top_k: "", max_output_tokens: "", seed: "" };
const SENDABLE_KEY = /^[\w!#$%&'*+.^`|~-]+$/; // what a WebSocket subprotocol may be made of
const NUM_PROGRESS_BLOCKS = 16;

const $ = (id) => document.getElementById(id);

const state = {
  link: FIRST_LINK,
  messages: recall(sessionStorage, "messages", []).map((message) => nextAnswer(message, { type: "dropped" }, 0)),
  draft: recall(sessionStorage, "draft", ""),
  editing: "", // id of the user's message that the draft will replace
  settings: { ...NO_SETTINGS, ...recall(localStorage, "settings", {}) },
  theme: recall(localStorage, "theme", ""), // "": as the system has it
  notice: "", // an error that belongs to no answer
  isFollowing: true, // the view stays at the newest line
};

const link = new Link({
  origin: location.origin,
  key: recall(sessionStorage, "key", ""),
  onEvent: receive,
  onLink(now) {
    const isLost = now.phase !== "ready";
    const messages = isLost ? state.messages.map((m) => nextAnswer(m, { type: "dropped" }, 0)) : state.messages;
    update({ link: now, messages, notice: isLost ? state.notice : "" });
    if (now.phase === "locked") askForKey();
  },
});

// --- state -------------------------------------------------------------------------------------

let frame = 0;

function update(changes) {
  Object.assign(state, changes);
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    render();
  });
}

function recall(storage, name, fallback) {
  try {
    return JSON.parse(storage.getItem(`streamkv.${name}`)) ?? fallback;
  } catch {
    return fallback; // not of our making
  }
}

function keep(storage, name, value) {
  try {
    storage.setItem(`streamkv.${name}`, JSON.stringify(value));
  } catch (error) {
    console.warn(`streamkv: ${name} won't outlive this page:`, error.message);
  }
}

const openAnswer = () => state.messages.findLast(isOpen);
const replaceMessage = (next) => update({ messages: state.messages.map((m) => (m.id === next.id ? next : m)) });

let numIds = 0;
const newId = () => `${Date.now().toString(36)}-${(numIds += 1)}`;

// --- conversation ------------------------------------------------------------------------------

function send(text) {
  if (!text.trim() || state.link.phase !== "ready" || openAnswer()) return;
  const end = state.messages.findIndex((message) => message.id === state.editing);
  const before = end < 0 ? state.messages : state.messages.slice(0, end);
  update({ editing: "", messages: [...before, { id: newId(), role: "user", text: text.trim() }] });
  if (text === state.draft) setDraft("");
  ask();
}

/** Asks for an answer to the conversation as it stands, in a lane of its own. */
function ask() {
  const answer = newAnswer(newId(), performance.now());
  const { messages, settings } = state;
  if (!link.send(createEvent({ model: state.link.model, messages, settings, streamId: answer.id }))) return;
  update({ messages: [...messages, answer], isFollowing: true, notice: "" });
  keep(sessionStorage, "messages", state.messages);
}

function receive(event) {
  if (event.type === "error" && !event.stream_id) update({ notice: errorText(event) });
  const answer = state.messages.find((message) => message.id === event.stream_id);
  if (!answer) return; // of a chat that was left meanwhile
  const next = nextAnswer(answer, event, performance.now());
  if (next === answer) return;
  replaceMessage(next);
  if (!isOpen(next)) keep(sessionStorage, "messages", state.messages);
}

/** Cancels by lane: that works before the response has an id, too. The server's last event ends the answer. */
function stop() {
  const answer = openAnswer();
  if (answer) link.send({ type: "response.cancel", stream_id: answer.id });
}

function setDraft(draft) {
  update({ draft });
  keep(sessionStorage, "draft", draft);
}

const actions = {
  stop,
  jump: () => update({ isFollowing: true }),
  retry: () => link.connect(),
  "enter-key": askForKey,
  "close-key": () => $("key").close(),
  "cancel-edit"() {
    update({ editing: "" });
    setDraft("");
  },
  "new-chat"() {
    stop();
    update({ messages: [], editing: "", notice: "", isFollowing: true });
    keep(sessionStorage, "messages", []);
    $("draft").focus();
  },
  regenerate() {
    if (state.link.phase !== "ready" || openAnswer()) return;
    if (state.messages.at(-1)?.role === "assistant") update({ messages: state.messages.slice(0, -1) });
    ask();
  },
  continue: () => send("Continue."),
  edit(button) {
    const message = messageOf(button);
    update({ editing: message.id });
    setDraft(message.text);
    $("draft").focus();
  },
  suggest(button) {
    setDraft(button.textContent);
    $("draft").focus();
  },
  copy: (button) => copyFrom(button, messageOf(button).text),
  "copy-code": (button) => copyFrom(button, button.closest("figure").querySelector("code").textContent),
  theme() {
    const isDark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    update({ theme: isDark ? "light" : "dark" });
    keep(localStorage, "theme", state.theme);
  },
  settings() {
    for (const [name, value] of Object.entries(state.settings)) settingsForm.elements[name].value = value;
    $("settings").showModal();
  },
  "reset-settings"() {
    settingsForm.reset();
    setSettings(NO_SETTINGS);
  },
};

const messageOf = (element) => state.messages.find((m) => m.id === element.closest("article").dataset.id);

async function copyFrom(button, text) {
  await copyText(text);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// --- dialogs -----------------------------------------------------------------------------------

const settingsForm = $("settings").querySelector("form");
const keyForm = $("key").querySelector("form");

function setSettings(settings) {
  update({ settings });
  keep(localStorage, "settings", settings);
}

settingsForm.addEventListener("change", ({ target }) => {
  if (!target.reportValidity()) return;
  const value = target.type === "number" && target.value !== "" ? target.valueAsNumber : target.value;
  setSettings({ ...state.settings, [target.name]: value });
});

function askForKey() {
  $("key-error").textContent = link.key ? state.link.detail || "The server did not take this key." : "";
  if (!$("key").open) $("key").showModal();
}

keyForm.addEventListener("submit", (event) => {
  const key = keyForm.elements.key.value.trim();
  if (!SENDABLE_KEY.test(key)) {
    event.preventDefault();
    $("key-error").textContent = "A browser can't send this key: use letters, digits and - _ . ~ only.";
    return;
  }
  link.key = key;
  keep(sessionStorage, "key", key);
  link.connect();
});

// --- drawing -----------------------------------------------------------------------------------

const views = new Map(); // id -> {node, message, isLast} as last drawn

function render() {
  document.documentElement.dataset.theme = state.theme;
  renderLink(state.link);
  renderWelcome(state.link);
  renderMessages();
  renderComposer();
  const scroller = $("scroller");
  if (state.isFollowing) scroller.scrollTop = scroller.scrollHeight;
  $("jump").hidden = state.isFollowing;
}

const LINK_TEXT = { probing: "Connecting", opening: "Connecting", loading: "Loading the model", locked: "Key needed" };

function renderLink({ phase, model }) {
  const isRetrying = state.link.attempt > 0 && phase !== "locked";
  $("link").dataset.phase = isRetrying ? "waiting" : phase;
  $("link-text").textContent = phase === "ready" ? model : isRetrying ? "Not connected" : LINK_TEXT[phase];
  const { text, isError = false, label = "", action = "" } = notice(isRetrying, state);
  $("notice").hidden = !text;
  $("notice").classList.toggle("error", isError);
  $("notice-text").textContent = text;
  $("notice-action").hidden = !label;
  $("notice-action").textContent = label;
  $("notice-action").dataset.action = action;
}

/** The one line above the composer: what most needs saying. */
function notice(isRetrying, { link: { phase, detail }, messages, editing, notice }) {
  if (isRetrying) return { text: `${detail}. Trying again …`, label: "Retry now", action: "retry" };
  if (phase === "locked") return { text: "The server asks for an API key", label: "Enter key", action: "enter-key" };
  if (phase === "loading" && messages.length) return { text: `Loading the model: ${detail}` };
  if (notice) return { text: notice, isError: true };
  if (!editing) return { text: "" };
  return { text: "Sending replaces this message and what follows it", label: "Cancel", action: "cancel-edit" };
}

function renderWelcome({ phase, detail }) {
  const isLoading = phase === "loading";
  $("welcome").hidden = state.messages.length > 0;
  $("suggestions").hidden = isLoading;
  $("welcome-title").textContent = isLoading ? "The model is loading" : "What would you like to know?";
  $("welcome-text").textContent = isLoading ? detail : "Your messages go to this server and nowhere else.";
  const percent = isLoading ? Number(/(\d+) ?%/.exec(detail)?.[1] ?? 0) : 100;
  const numFilled = Math.round((percent / 100) * NUM_PROGRESS_BLOCKS);
  $("progress").hidden = !isLoading;
  $("progress").replaceChildren(
    ...Array.from({ length: NUM_PROGRESS_BLOCKS }, (_, index) => h("i", { class: index < numFilled && "filled" })),
  );
}

function renderMessages() {
  const ids = new Set(state.messages.map((message) => message.id));
  for (const [id, { node }] of views) {
    if (ids.has(id)) continue;
    node.remove();
    views.delete(id);
  }
  state.messages.forEach((message, index) => {
    const view = views.get(message.id) ?? newView(message);
    const isLast = index === state.messages.length - 1;
    if (view.message === message && view.isLast === isLast) return;
    Object.assign(view, { message, isLast });
    if (message.role === "user") view.body.textContent = message.text;
    else drawMarkdown(view.body, message.text);
    renderMeta(view);
  });
}

function newView(message) {
  const body = h("div", { class: "body" });
  const meta = h("footer", {});
  const label = message.role === "user" ? "You" : "Answer";
  const node = h("article", { class: message.role, "data-id": message.id, "aria-label": label }, body, meta);
  $("conversation").append(node);
  const view = { node, body, meta };
  views.set(message.id, view);
  return view;
}

const OUTCOME = {
  stopped: "Stopped",
  length: "Reached the token limit",
  dropped: "The connection was lost; this is what had arrived",
};

function renderMeta({ node, meta, message, isLast }) {
  const button = (label, action) => h("button", { type: "button", class: "quiet", "data-action": action }, label);
  if (message.role === "user") {
    meta.replaceChildren(button("Edit", "edit"), button("Copy", "copy"));
    return;
  }
  node.dataset.status = message.status;
  node.setAttribute("aria-busy", isOpen(message));
  if (isOpen(message)) return meta.replaceChildren();
  const canContinue = isLast && message.text && message.status in OUTCOME;
  meta.replaceChildren(
    ...(message.error ? [h("p", { class: "error", role: "alert" }, message.error)] : []),
    ...(OUTCOME[message.status] ? [h("p", { class: "outcome" }, OUTCOME[message.status])] : []),
    h("p", { class: "stats" }, answerStats(message).map((stat) => h("span", {}, stat))),
    h(
      "div",
      { class: "actions" },
      message.text && button("Copy", "copy"),
      isLast && button("Regenerate", "regenerate"),
      canContinue && button("Continue", "continue"),
    ),
  );
}

function renderComposer() {
  const draft = $("draft");
  if (draft.value !== state.draft) draft.value = state.draft;
  draft.style.height = "auto";
  draft.style.height = `${draft.scrollHeight}px`; // CSS sets the most it may be
  const answer = openAnswer();
  $("stop").hidden = !answer;
  $("send").hidden = Boolean(answer);
  $("send").disabled = state.link.phase !== "ready" || !state.draft.trim();
}

// --- input -------------------------------------------------------------------------------------

document.addEventListener("click", ({ target }) => {
  const button = target.closest("[data-action]");
  if (button) actions[button.dataset.action]?.(button);
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(state.draft);
});

$("draft").addEventListener("input", ({ target }) => setDraft(target.value));

$("draft").addEventListener("keydown", (event) => {
  // 229: an input method takes this key (Safari says so after isComposing has ended).
  const isComposing = event.isComposing || event.keyCode === 229;
  if (event.key !== "Enter" || event.shiftKey || isComposing) return;
  event.preventDefault();
  send(state.draft);
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (openAnswer()) stop();
  else if (state.editing) actions["cancel-edit"]();
});

$("scroller").addEventListener("scroll", ({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
  const isFollowing = scrollHeight - scrollTop - clientHeight < 48;
  if (isFollowing !== state.isFollowing) update({ isFollowing });
});

addEventListener("resize", () => update({}));
addEventListener("online", () => state.link.phase === "waiting" && link.connect());
addEventListener("pagehide", () => keep(sessionStorage, "messages", state.messages));

link.connect();
render();
