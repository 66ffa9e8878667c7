// The logs of a job's pods, which follow while they are looked at.

import { el } from "./dom.js";

const MAX_LINES = 5000;
const RETRY_MS = 5000;
const BAD = /\b(ERROR|CRITICAL|FATAL|Traceback|Error:)/;
const UNSURE = /\bWARN(ING)?\b/;

export class Logs {
  constructor(id) {
    this.id = id;
    this.pod = el("select", { "aria-label": "Pod" });
    this.follow = el("input", { type: "checkbox", checked: true, id: "follow" });
    this.filter = el("input", { type: "search", placeholder: "Filter lines", "aria-label": "Filter lines" });
    this.state = el("span", { class: "soft", role: "status" });
    this.lines = [];
    this.out = el("pre", { class: "log", tabindex: 0, "aria-label": "Log" });
    this.pod.addEventListener("change", () => this.open());
    this.filter.addEventListener("input", () => this.draw());
    this.out.addEventListener("scroll", () => { if (this.out.scrollTop + this.out.clientHeight < this.out.scrollHeight - 40) this.follow.checked = false; });
    this.follow.addEventListener("change", () => this.toEnd());
    const tools = el("div", { class: "tools" }, this.state, this.filter, el("label", { for: "follow" }, this.follow, " follow"), this.pod);
    this.element = el("section", { class: "card" }, el("header", null, el("h2", null, "Logs"), tools), this.out);
  }

  show(pods, phase) {
    if (this.isOver && phase !== this.phase) this.open(); // of a job that was resumed, or has begun
    this.phase = phase;
    const names = ["master", ...new Set(pods.filter((name) => name !== "master"))];
    if (JSON.stringify(names) !== this.names) {
      this.names = JSON.stringify(names);
      const chosen = this.pod.value || "master";
      this.pod.replaceChildren(...names.map((name) => el("option", { value: name }, name)), el("option", { value: "" }, "all pods"));
      this.pod.value = names.includes(chosen) || chosen === "" ? chosen : "master";
    }
    if (!this.source) this.open();
  }

  open() {
    this.close();
    this.lines = [];
    this.isOver = false;
    this.out.replaceChildren();
    this.state.replaceChildren("reading …");
    this.source = new EventSource(`api/jobs/${this.id}/logs?pod=${encodeURIComponent(this.pod.value)}`);
    this.source.addEventListener("lines", (event) => this.take(JSON.parse(event.data)));
    this.source.addEventListener("end", (event) => {
      const { error } = JSON.parse(event.data);
      this.state.replaceChildren(error ? error.replace(/^error: /, "").split("\n")[0] : "that is all");
      this.isOver = true;
      this.source.close();
    });
    const current = this.source;
    current.addEventListener("error", () => {
      this.state.replaceChildren("the log cannot be read now");
      current.close();
      setTimeout(() => this.source === current && this.open(), RETRY_MS);
    });
  }

  take(lines) {
    this.state.replaceChildren("");
    this.lines.push(...lines);
    if (this.lines.length > MAX_LINES) this.lines.splice(0, this.lines.length - MAX_LINES);
    this.append(lines);
    while (this.out.childElementCount > MAX_LINES) this.out.firstElementChild.remove();
    this.toEnd();
  }

  draw() {
    this.out.replaceChildren();
    this.append(this.lines);
    this.toEnd();
  }

  append(lines) {
    const text = this.filter.value.toLowerCase();
    const all = this.pod.value === "" || ["worker", "ps"].includes(this.pod.value);
    const wanted = text ? lines.filter(([pod, line]) => `${pod} ${line}`.toLowerCase().includes(text)) : lines;
    this.out.append(...wanted.slice(-MAX_LINES).map(([pod, line]) =>
      el("div", { class: BAD.test(line) ? "bad" : UNSURE.test(line) ? "unsure" : null }, all ? el("span", { class: "pod" }, `${pod} `) : null, line || " ")));
  }

  toEnd() {
    if (this.follow.checked) this.out.scrollTop = this.out.scrollHeight;
  }

  close() {
    this.source?.close();
    this.source = null;
  }
}
