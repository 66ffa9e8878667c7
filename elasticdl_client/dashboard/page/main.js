// The address selects the view: #/ all jobs, #/job/ID/TAB one.  One stream of events feeds it.

import { el, hideTip, update } from "./dom.js";
import { JobView } from "./job.js";
import { JobsView } from "./jobs.js";

const main = document.getElementById("main");
const path = document.querySelector(".path");
const link = document.querySelector(".link");
const dialog = document.getElementById("confirm");
const notices = el("div", { role: "status" }); // places that do not answer
const PATIENCE_MS = 15_000; // a stream that brings nothing for so long is opened again
const session = { action: "", read_only: true };
let source = null, view = null, shown = null, newest = null;

const act = {
  get allowed() {
    return !session.read_only;
  },
  confirm(action, job) {
    const what = {
      delete: `Job ${job.name} is ended, and all that there is of it is removed${job.directory ? `: also ${job.directory} with its logs and checkpoints` : ""}. This cannot be undone.`,
      resume: `Job ${job.name} gets a new master and continues where it was.`,
      scale: `Job ${job.name} wants ${job.workers[1]} workers. In a range (2:16) their number follows what another one adds. New ones start as soon as there is room; those that are not wanted any more hand back their work first.`,
    }[action];
    const word = { delete: "Delete", resume: "Resume", scale: "Scale" }[action];
    const number = action === "scale" ? el("input", { type: "text", size: 8, value: job.workers[1], id: "num_workers", title: "a number such as 4, a range such as 2:16, or auto" }) : null;
    const problem = el("p", { class: "note", role: "alert" });
    const go = el("button", { type: "button", class: action === "delete" ? "danger" : "primary" }, word);
    go.addEventListener("click", async () => {
      go.disabled = true;
      problem.replaceChildren("…");
      const query = number ? `?num_workers=${encodeURIComponent(number.value)}` : "";
      const response = await fetch(`api/jobs/${job.id}/${action}${query}`, { method: "POST", headers: { "x-elasticdl-action": session.action } }).catch(() => null);
      const answer = await answerIn(response);
      if (response?.ok && answer?.done) {
        dialog.close();
        if (action === "delete") location.hash = "#/";
      } else {
        go.disabled = false;
        problem.replaceChildren(answer?.error ? `${answer.error} ${answer.hint ?? ""}` : "The dashboard does not answer.");
      }
    });
    const keep = el("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
    const asked = number ? el("label", { for: "num_workers" }, "Workers ", number) : null;
    dialog.setAttribute("aria-label", `${word} ${job.name}?`);
    dialog.replaceChildren(el("h2", null, `${word} ${job.name}?`), el("p", null, what), ...(asked ? [asked] : []), problem, el("div", { class: "tools" }, keep, go));
    dialog.showModal();
    (number ?? keep).focus();
  },
};

// The answer to an action, or null: a proxy sends pages of its own, and may cut one off.
async function answerIn(response) {
  const type = response?.headers.get("content-type") ?? "";
  if (type.startsWith("application/json")) return response.json().catch(() => null);
  return type.startsWith("text/plain") ? { error: (await response.text().catch(() => "")).trim() } : null;
}

function place() {
  const [, kind, id, tab] = location.hash.split("/");
  return kind === "job" && /^[0-9a-f]{16}$/.test(id ?? "") ? { id, tab: tab ?? "overview" } : { id: "", tab: "" };
}

function go() {
  hideTip();
  const { id, tab } = place();
  if (shown !== id) {
    view?.close?.();
    shown = id;
    view = id ? new JobView(id, act) : new JobsView();
    document.title = "ElasticDL";
    path.replaceChildren();
    main.replaceChildren(el("p", { class: "empty" }, "Looking …"));
    main.setAttribute("aria-busy", "true");
    connect(id);
    if (!id && newest) show();
  }
  if (id) view.open(tab);
}

function show() {
  main.replaceChildren(notices, view.element);
  main.setAttribute("aria-busy", "false");
}

function connect(id) {
  source?.close();
  const current = new EventSource(`api/stream${id ? `?job=${id}` : ""}`);
  source = current;
  let arrived = false;
  setTimeout(() => current === source && !arrived && connect(id), PATIENCE_MS);
  const on = (name, take) => current.addEventListener(name, (event) => current === source && take(JSON.parse(event.data)));
  on("session", (value) => {
    Object.assign(session, value);
    online(true);
  });
  on("jobs", (value) => {
    arrived ||= !id;
    newest = value;
    update(notices, value.problems, (problems) => problems.map((text) => el("p", { class: "problem" }, text)));
    if (!id) view.show(value);
    if (!id && view.element.parentNode !== main) show();
  });
  on("job", (value) => {
    arrived = true;
    path.replaceChildren("/ ", value.name);
    view.show(value);
    if (view.element.parentNode !== main) show();
  });
  on("events", (rows) => view.take(rows));
  on("gone", ({ why }) => {
    arrived = true;
    main.replaceChildren(notices, el("p", { class: "empty" }, `${why} `, el("a", { href: "#/" }, "All jobs")));
  });
  current.addEventListener("error", () => {
    if (current !== source) return;
    online(false);
    if (current.readyState === EventSource.CLOSED) setTimeout(() => current === source && connect(id), 3000);
  });
}

function online(is) {
  link.classList.toggle("lost", !is);
  link.replaceChildren(is ? "live" : "no connection");
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  view?.draw?.();
}

const dark = matchMedia("(prefers-color-scheme: dark)");
const chosen = () => localStorage.getItem("elasticdl-theme") ?? (dark.matches ? "dark" : "light");
theme(chosen());
dark.addEventListener("change", () => theme(chosen()));
document.querySelector(".theme").addEventListener("click", () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("elasticdl-theme", next);
  theme(next);
});
document.addEventListener("visibilitychange", () => document.hidden || view?.draw?.());
addEventListener("hashchange", go);
go();
