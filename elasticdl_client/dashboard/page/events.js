// The events of a job: kept by number, listed newest first, each with what it follows from.

import { el } from "./dom.js";
import { ago, day } from "./format.js";

const STEP = 150; // shown at a time
const MOST = 20_000; // kept of a job that is watched for days; a master keeps fewer

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.byNumber = new Map();
    this.bySubject = new Map();
    this.list = [];
  }

  add(rows) {
    const [first, at] = rows[0] ?? [];
    if (this.byNumber.has(first) && this.byNumber.get(first).at !== at) this.clear(); // another job has this place now
    for (const [number, at, kind, subject, text, cause, trouble] of rows) {
      if (this.byNumber.has(number)) continue;
      const event = { number, at, kind, subject, text, cause, trouble: Boolean(trouble) };
      this.keep(event);
    }
    if (this.list.length > MOST) {
      const newest = this.list.slice(-MOST / 2);
      this.clear();
      newest.forEach((event) => this.keep(event));
    }
  }

  keep(event) {
    this.byNumber.set(event.number, event);
    this.list.push(event);
    if (!this.bySubject.has(event.subject)) this.bySubject.set(event.subject, []);
    this.bySubject.get(event.subject).push(event);
  }

  // The events that led to one, the nearest first; of its own subject only troubles: that a pod was created explains
  // nothing.
  chain(event) {
    const found = [];
    let cause = this.byNumber.get(event.cause);
    while (cause && found.length < 20) {
      if (cause.trouble || cause.subject !== event.subject) found.push(cause);
      cause = cause.cause < cause.number ? this.byNumber.get(cause.cause) : undefined;
    }
    return found;
  }
}

export class EventList {
  constructor(history) {
    this.history = history;
    this.limit = STEP;
    this.kind = el("select", { "aria-label": "Which events" }, el("option", { value: "" }, "All events"), el("option", { value: "trouble" }, "Troubles only"));
    this.text = el("input", { type: "search", placeholder: "Filter: worker-3, PodLost …", "aria-label": "Filter events" });
    this.more = el("button", { type: "button", onclick: () => { this.limit += 4 * STEP; this.draw(); } }, "Show more");
    this.list = el("ol", { class: "list", "aria-label": "Events, newest first" });
    this.count = el("span", { class: "soft" });
    for (const input of [this.kind, this.text]) input.addEventListener("input", () => this.draw());
    this.element = el("section", { class: "card" }, el("header", null, el("h2", null, "Events"), el("div", { class: "tools" }, this.count, this.kind, this.text)), this.list, this.more);
    this.drawn = -1;
  }

  show(summedUp) {
    this.summedUp = Object.values(summedUp).reduce((a, b) => a + b, 0);
    if (this.drawn !== this.history.list.length) this.draw();
  }

  draw() {
    this.drawn = this.history.list.length;
    const text = this.text.value.trim().toLowerCase();
    const wanted = this.history.list.filter((event) =>
      (!this.kind.value || event.trouble) && (!text || `${event.kind} ${event.subject} ${event.text}`.toLowerCase().includes(text)));
    this.count.replaceChildren(`${wanted.length} of ${this.drawn}${this.summedUp ? `, ${this.summedUp} older ones are summed up` : ""}`);
    this.list.replaceChildren(...wanted.slice(-this.limit).reverse().map((event) => eventRow(event, this.history)));
    this.more.hidden = wanted.length <= this.limit;
  }
}

export function eventRow(event, history) {
  const chain = history.chain(event);
  return el("li", { class: `event${event.trouble ? " trouble" : ""}`, "data-number": event.number },
    el("time", { class: "soft", title: day(event.at) }, ago(event.at)),
    el("div", { class: "kind" }, event.kind),
    el("div", null, event.subject),
    el("div", null, el("div", { class: "text" }, event.text), chain.map((cause) => el("div", { class: "why" }, `because: ${cause.kind} ${cause.subject} ${cause.text.split("\n")[0]}`))));
}
