// Owns the page's looks: render(state) makes the document show the state. Knows no protocol and
// changes no state. Invariant: after render(state) the document says what the state says; only what
// differs from the last time is touched.

import { answerStats, isOpen } from "./answer.js";
import { h } from "./dom.js";
import { drawMarkdown } from "./draw.js";

const NUM_PROGRESS_BLOCKS = 16;
const LINK_TEXT = {
  probing: "Connecting",
  opening: "Connecting",
  loading: "Loading the model",
  locked: "Key needed",
};
const OUTCOME = {
  stopped: "Stopped",
  length: "Reached the token limit",
  dropped: "The connection was lost; this is what had arrived",
};

const $ = (id) => document.getElementById(id);
const views = new Map(); // message id -> {node, body, meta, message, isLast} as last drawn

export function render(state) {
  document.documentElement.dataset.theme = state.theme;
  renderLink(state);
  renderWelcome(state);
  renderMessages(state.messages);
  renderComposer(state);
  const scroller = $("scroller");
  if (state.isFollowing) scroller.scrollTop = scroller.scrollHeight;
  $("jump").hidden = state.isFollowing;
}

const isRetrying = ({ phase, attempt }) => attempt > 0 && phase !== "locked";

function renderLink(state) {
  const { phase, model } = state.link;
  const isLost = isRetrying(state.link);
  $("link").dataset.phase = isLost ? "waiting" : phase;
  const text = isLost ? "Not connected" : LINK_TEXT[phase];
  $("link-text").textContent = phase === "ready" ? model : text;

  const notice = mostUrgent(state);
  $("notice").hidden = !notice.text;
  $("notice").classList.toggle("error", notice.isError ?? false);
  $("notice-text").textContent = notice.text;
  $("notice-action").hidden = !notice.label;
  $("notice-action").textContent = notice.label ?? "";
  $("notice-action").dataset.action = notice.action ?? "";
}

/** The one line above the composer. */
function mostUrgent({ link, messages, editing, notice }) {
  if (isRetrying(link)) {
    return { text: `${link.detail}. Trying again …`, label: "Retry now", action: "retry" };
  }
  if (link.phase === "locked") {
    return { text: "The server asks for an API key", label: "Enter key", action: "enter-key" };
  }
  if (link.phase === "loading" && messages.length) {
    return { text: `Loading the model: ${link.detail}` };
  }
  if (notice || !editing) return { text: notice, isError: true };
  const text = "Sending replaces this message and what follows it";
  return { text, label: "Cancel", action: "cancel-edit" };
}

function renderWelcome({ link: { phase, detail }, messages }) {
  const isLoading = phase === "loading";
  $("welcome").hidden = messages.length > 0;
  $("suggestions").hidden = isLoading;
  $("progress").hidden = !isLoading;
  const [title, text] = isLoading
    ? ["The model is loading", detail]
    : ["What would you like to know?", "Your messages go to this server and nowhere else."];
  $("welcome-title").textContent = title;
  $("welcome-text").textContent = text;
  if (!isLoading) return;
  const percent = Number(/(\d+) ?%/.exec(detail)?.[1] ?? 0);
  const numFilled = Math.round((percent / 100) * NUM_PROGRESS_BLOCKS);
  const block = (_, index) => h("i", { class: index < numFilled && "filled" });
  $("progress").replaceChildren(...Array.from({ length: NUM_PROGRESS_BLOCKS }, block));
}

function renderMessages(messages) {
  const ids = new Set(messages.map((message) => message.id));
  for (const [id, { node }] of views) {
    if (ids.has(id)) continue;
    node.remove();
    views.delete(id);
  }
  messages.forEach((message, index) => {
    const view = views.get(message.id) ?? newView(message);
    const isLast = index === messages.length - 1;
    if (view.message === message && view.isLast === isLast) return;
    Object.assign(view, { message, isLast });
    if (message.role === "user") view.body.textContent = message.text;
    else drawMarkdown(view.body, message.text);
    renderMeta(view);
  });
}

function newView({ id, role }) {
  const body = h("div", { class: "body" });
  const meta = h("footer");
  const label = role === "user" ? "You" : "Answer";
  const node = h("article", { class: role, "data-id": id, "aria-label": label }, body, meta);
  $("conversation").append(node);
  const view = { node, body, meta };
  views.set(id, view);
  return view;
}

const button = (label, action) =>
  h("button", { type: "button", class: "quiet", "data-action": action }, label);

function renderMeta({ node, meta, message, isLast }) {
  const { role, status, error, text } = message;
  if (role === "user") return meta.replaceChildren(button("Edit", "edit"), button("Copy", "copy"));
  node.dataset.status = status;
  node.setAttribute("aria-busy", isOpen(message));
  node.toggleAttribute("data-away", isOpen(message) && message.isAway);
  if (isOpen(message)) {
    const away = h("p", { class: "outcome" }, "Reconnecting …");
    return meta.replaceChildren(message.isAway ? away : "");
  }
  const actions = [
    text && button("Copy", "copy"),
    isLast && button("Regenerate", "regenerate"),
    isLast && text && status in OUTCOME && button("Continue", "continue"),
  ];
  const stats = answerStats(message).map((stat) => h("span", {}, stat));
  meta.replaceChildren(
    error ? h("p", { class: "error", role: "alert" }, error) : "",
    status in OUTCOME ? h("p", { class: "outcome" }, outcomeText(message)) : "",
    stats.length ? h("p", { class: "stats" }, stats) : "",
    h("div", { class: "actions" }, actions),
  );
}

const outcomeText = ({ status, text }) =>
  status === "dropped" && !text ? "The connection was lost before anything came" : OUTCOME[status];

function renderComposer({ draft, link, messages }) {
  const field = $("draft");
  if (field.value !== draft) field.value = draft;
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`; // CSS sets the most it may be
  const isBusy = messages.some(isOpen);
  $("stop").hidden = !isBusy;
  $("send").hidden = isBusy;
  $("send").disabled = link.phase !== "ready" || !draft.trim();
}
