// Keyboard, filters and drafts of the review page. The page works without it.
"use strict";

const DECIDING = "#fusions .deciding > .card";
const cards = () => [...document.querySelectorAll(DECIDING)].filter((card) => !card.hidden);
let here = null;

// What a step or a link leads to is never left folded away.
function unfold(element) {
  for (let fold = element?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
}

function go(card) {
  if (!card) return;
  unfold(card);
  document.querySelectorAll(".card.here").forEach((old) => old.classList.remove("here"));
  card.classList.add("here");
  here = card.id;
  const title = card.querySelector("h3");
  title.focus({ preventScroll: true });
  card.scrollIntoView({ block: "center" });
}

function step(by, wanted = () => true) {
  const all = cards();
  const at = all.findIndex((card) => card.id === here);
  for (let i = 1; i <= all.length; i++) {
    const card = all[(at + by * i + all.length * 2 + (at < 0 && by < 0 ? 1 : 0)) % all.length];
    if (wanted(card)) return go(card);
  }
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const card = here && document.getElementById(here);
  const body = card && card.querySelector("details.body");
  switch (event.key) {
    case "j": step(1); break;
    case "k": step(-1); break;
    case "u": step(1, (each) => each.dataset.state === "undecided"); break;
    case "o": if (body) body.open = !body.open; break;
    case "a": card?.querySelector("button.accept")?.click(); break;
    case "r": if (body) { body.open = true; body.querySelector("textarea")?.focus(); } break;
    default: return;
  }
  event.preventDefault();
});

function show(which) {
  document.querySelectorAll(".filters button").forEach((button) =>
    button.setAttribute("aria-pressed", String(button.dataset.show === which)));
  document.querySelectorAll(DECIDING).forEach((card) => {
    card.hidden = (which === "undecided" && card.dataset.state !== "undecided") ||
      (which === "fused" && card.dataset.fused !== "yes");
  });
  document.querySelectorAll("#kept, #kept .by-why").forEach((group) => {
    group.hidden = !group.querySelector(".deciding > .card:not([hidden])");
  });
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-show]");
  if (button) show(button.dataset.show);
  const link = event.target.closest('a[href^="#"]');
  if (link) unfold(document.getElementById(link.hash.slice(1)));
});
function arrive() {
  const element = document.getElementById(location.hash.slice(1));
  if (!element?.closest("details:not([open])")) return;
  unfold(element);
  element.scrollIntoView();
}
addEventListener("hashchange", arrive);
arrive();

// A group that was opened stays open when a decision brings the page anew.
const opened = new Set();
document.addEventListener("toggle", (event) => {
  if (event.target.id) opened[event.target.open ? "add" : "delete"](event.target.id);
}, true);

// What was typed and not sent is still there after the page was closed.
const key = (field) => `shardwright:${document.getElementById("page").dataset.plan}:${field.dataset.draft}`;
const restore = () => document.querySelectorAll("[data-draft]").forEach((field) => {
  if (!field.value) field.value = localStorage.getItem(key(field)) ?? "";
});
document.addEventListener("input", (event) => {
  if (event.target.dataset?.draft) localStorage.setItem(key(event.target), event.target.value);
});
document.addEventListener("input", (event) => {
  const label = event.target.closest(".axes label");
  if (!label) return;
  const field = event.target;
  const first = field.options ? [...field.options].find((option) => option.defaultSelected)?.value : field.defaultValue;
  label.classList.toggle("touched", field.value !== first);
});
document.addEventListener("htmx:afterSwap", () => {
  restore();
  opened.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
  const left = document.querySelectorAll(`${DECIDING}[data-state="undecided"]`).length;
  const button = document.querySelector('[data-show="undecided"]');
  if (button) button.textContent = `undecided ${left}`;
  const card = here && document.getElementById(here);
  if (card) card.classList.add("here");
});
document.addEventListener("htmx:sendError", () => {
  document.getElementById("notice").innerHTML =
    '<p class="notice bad"><strong>The review is not running any more.</strong> Start `shardwright review` again: what was decided is kept, and so is what you typed.</p>';
});
restore();

// What happens while the page is open comes as server-sent events.
const stream = new EventSource("/events");
stream.addEventListener("run", (event) => {
  const old = document.getElementById("run");
  if (old) old.outerHTML = event.data;
});
stream.addEventListener("plan", (event) => {
  const page = document.getElementById("page"), notice = document.getElementById("notice");
  if (!page || !notice || event.data === page.dataset.plan || document.querySelector(".htmx-request")) return;
  notice.innerHTML = '<p class="notice">The plan was changed elsewhere. <a href="/">Load it as it stands now</a>; what you typed is kept.</p>';
});
addEventListener("pagehide", () => stream.close());

// On paper everything is open.
addEventListener("beforeprint", () => document.querySelectorAll("#page details:not([open])").forEach((each) => {
  each.open = true;
  each.dataset.printed = "yes";
}));
addEventListener("afterprint", () => document.querySelectorAll("#page details[data-printed]").forEach((each) => {
  each.open = false;
  delete each.dataset.printed;
}));
