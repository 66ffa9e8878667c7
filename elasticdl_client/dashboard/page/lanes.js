// A lane for each pod: its activity over time, the reason of its end, and its events.

import { stateColour, STATES } from "./charts.js";
import { el, hideTip, showTip, styled, svg } from "./dom.js";
import { clock, duration, percent } from "./format.js";

const SPANS = { waiting: "pending", starting: "starting", working: "working", leaving: "leaving" };
const ORDER = Object.keys(STATES);
const TOP = 3, HEIGHT = 14; // of the shapes in a lane, in pixels
const NARROW = 2; // pixels: cells of less are drawn as one
const NEAR = 7; // pixels within which the pointer is on a mark
const QUIET = new Set(["PodCreated", "PodRunning", "WorkerRegistered", "PsReady", "PodCompleted"]); // the spans show them
const BUCKETS = 220; // marks nearer to each other than this part of the width are one

export class Lanes {
  constructor(chain) {
    this.chain = chain; // of an event: those that led to it
    this.rows = new Map();
    this.width = 0; // of a strip, in pixels
    new ResizeObserver(() => this.measure()).observe(document.getElementById("main"));
    this.body = el("div", { class: "lanes", role: "list", "aria-label": "Pods over time" });
    this.axis = el("div", { class: "axis", "aria-hidden": "true" });
    this.keys = el("div", { class: "keys" });
    this.element = el("section", { class: "card wide" }, el("header", null, el("h2", null, "Pods over time"), this.keys), this.body, this.axis);
  }

  // The legend of the spans and cells; a state that no worker was in is left out.
  drawKeys() {
    const found = new Set([...this.rows.values()].flatMap((row) => row.cells.flatMap((cell) => Object.keys(cell.shares))));
    const states = ORDER.filter((state) => found.has(state) && state !== "starting").map((state) => [state, this.times.label(state)]);
    const text = JSON.stringify([states, document.documentElement.dataset.theme]);
    if (text === this.keyed) return;
    this.keyed = text;
    const spans = Object.entries(SPANS).map(([span, label]) => el("span", null, el("i", { class: `key-${span}` }), label));
    this.keys.replaceChildren(...spans, ...states.map(([state, label]) => el("span", null, styled(el("i"), { background: stateColour(state) }), label)),
      el("span", null, "▲ trouble"), el("span", null, "✕ lost"), el("span", null, "✓ done"));
  }

  measure() {
    const width = this.rows.values().next().value?.strip.clientWidth ?? 0;
    if (!width || width === this.width) return;
    this.width = width;
    for (const row of this.rows.values()) row.draw();
  }

  show(lanes, times, bySubject, begin, until) {
    this.times = new PodTimes(times);
    this.begin = begin;
    this.length = Math.max(1, until - begin);
    const pods = new Set(lanes.map((lane) => lane.name));
    const others = [...bySubject].filter(([subject]) => !pods.has(subject)).flatMap(([, events]) => events);
    const all = [{ name: "job", spans: [], endings: [] }, ...lanes];
    const seen = new Set();
    let before = null;
    for (const lane of all) {
      const events = lane.name === "job" ? others : bySubject.get(lane.name) ?? [];
      let row = this.rows.get(lane.name);
      if (!row) {
        row = new Row(this, lane.name);
        this.rows.set(lane.name, row);
      }
      if (row.element.previousSibling !== before || row.element.parentNode !== this.body) {
        if (before) before.after(row.element);
        else this.body.prepend(row.element);
      }
      before = row.element;
      row.show(lane, events, this.times.cells(lane));
      seen.add(lane.name);
    }
    for (const [name, row] of this.rows) {
      if (seen.has(name)) continue;
      row.element.remove();
      this.rows.delete(name);
    }
    if (!this.rows.has(this.reached?.name)) this.reach(this.rows.get("job"));
    this.measure();
    this.drawKeys();
    const ticks = innerWidth < 760 ? 3 : 6;
    this.axis.replaceChildren(...Array.from({ length: ticks }, (_, i) => el("span", null, clock(begin + (this.length * i) / (ticks - 1), this.length))));
  }

  // Tab stops at one lane, the last that had the focus; the arrows lead to the others.
  reach(row) {
    if (this.reached && this.reached !== row) this.reached.element.tabIndex = -1;
    this.reached = row;
    row.element.tabIndex = 0;
  }

  part(at) {
    return Math.min(1, Math.max(0, (at - this.begin) / this.length));
  }
}

// How the time of workers was split, in cells as the journal has them: "a87f13" is 87 % in state a, 13 % in f.
class PodTimes {
  constructor({ length_s, began_at, states, labels, pods }) {
    Object.assign(this, { length: length_s, began: began_at, states, labels, pods });
  }

  label(state) {
    return this.labels[state] ?? state;
  }

  // Each with the shares of its own time; cut off where the pod did not run.
  cells({ name, spans }) {
    const [first, text] = this.pods[name.replace("worker-", "")] ?? [0, ""];
    const ran = spans.filter(([state]) => state === "starting" || state === "working" || state === "leaving");
    if (!text || !ran.length) return [];
    const low = ran[0][1], high = ran.at(-1)[2];
    return text.split(" ").map((cell, i) => {
      const parts = [...cell.matchAll(/([a-z])(\d+)/g)].map(([, letter, value]) => [this.states[letter.charCodeAt(0) - 97], Number(value)]);
      const begin = this.began + (first + i) * this.length;
      return { begin: Math.max(low, begin), end: Math.min(high, begin + this.length), shares: sharesOf(parts) };
    }).filter((cell) => cell.end > cell.begin && Object.keys(cell.shares).length);
  }
}

// Weights by state to shares of all of them.
function sharesOf(parts) {
  const sum = parts.reduce((all, [, value]) => all + value, 0);
  const shares = {};
  for (const [state, value] of parts) if (value) shares[state] = (shares[state] ?? 0) + value / sum;
  return shares;
}

// Cells of at least a length, of those given.
function joined(cells, length) {
  const found = [];
  for (let i = 0; i < cells.length; ) {
    const parts = [], { begin } = cells[i];
    let end = begin;
    do {
      for (const [state, share] of Object.entries(cells[i].shares)) parts.push([state, share * (cells[i].end - cells[i].begin)]);
      end = cells[i].end;
      i += 1;
    } while (i < cells.length && end - begin < length);
    found.push({ begin, end, shares: sharesOf(parts) });
  }
  return found;
}

class Row {
  constructor(lanes, name) {
    this.lanes = lanes;
    this.name = name;
    this.chosen = -1;
    this.cells = [];
    this.strip = svg("svg", { "aria-hidden": "true" });
    this.element = el("div", { class: "lane", role: "listitem", tabindex: -1, "data-pod": name }, el("b", null, name), this.strip);
    this.element.addEventListener("focus", () => this.lanes.reach(this));
    this.element.addEventListener("pointermove", (event) => this.point(event));
    this.element.addEventListener("pointerleave", hideTip);
    this.element.addEventListener("blur", () => {
      this.chosen = -1;
      hideTip();
    });
    this.element.addEventListener("keydown", (event) => this.press(event));
  }

  show(lane, events, cells) {
    this.lane = lane;
    this.cells = cells;
    this.marks = merged(events, (at) => this.lanes.part(at));
    const last = lane.endings.at(-1);
    const runs = lane.spans.length > 0 && (!last || lane.spans.at(-1)[2] > last[1]);
    this.element.classList.toggle("over", !runs && last?.[0] === "lost");
    this.element.setAttribute("aria-label", this.described(runs, last));
    this.draw();
  }

  // A few shapes for all marks of a kind: a page may have ten thousand marks.
  draw() {
    const { lane, lanes: { width } } = this;
    if (!width || !lane) return;
    const text = JSON.stringify([lane, this.marks.length, this.marks.at(-1)?.events.length, this.lanes.begin, this.lanes.length, this.chosen, width, this.cells.length, this.cells.at(-1), document.documentElement.dataset.theme]);
    if (text === this.text) return;
    this.text = text;
    const x = (at) => width * this.lanes.part(at);
    const nodes = lane.spans.map(([state, from, to]) =>
      svg("rect", { class: `span-${state}`, x: x(from).toFixed(1), width: Math.max(1.5, x(to) - x(from)).toFixed(1), y: TOP, height: HEIGHT, rx: 2 }));
    nodes.push(...this.stacks(width));
    const ends = new Set(lane.endings.map((one) => one[3]));
    const shown = this.marks.filter((mark) => mark.events.some((event) => !ends.has(event.number) && !QUIET.has(event.kind)));
    nodes.push(shapes("mark", shown.filter((mark) => !mark.trouble), width), shapes("mark trouble", shown.filter((mark) => mark.trouble), width));
    nodes.push(...lane.endings.map(([how, at]) => svg("path", { class: how === "done" ? "done" : "cross", d: how === "done" ? `M${x(at) - 9} 10l3 3.5l5 -7.5` : `M${x(at) - 3.5} 6l7 8m0 -8l-7 8` })));
    if (this.marks[this.chosen]) nodes.push(shapes("mark chosen", [this.marks[this.chosen]], width));
    this.strip.replaceChildren(...nodes.filter(Boolean));
  }

  // The shares of each cell, stacked; one shape for all that is of a state.
  stacks(width) {
    const drawn = Object.fromEntries(ORDER.map((state) => [state, ""]));
    for (const { begin, end, shares } of joined(this.cells, (NARROW * this.lanes.length) / width)) {
      const left = width * this.lanes.part(begin), wide = width * this.lanes.part(end) - left;
      let bottom = TOP + HEIGHT;
      for (const state of ORDER) {
        const high = HEIGHT * (shares[state] ?? 0);
        if (high < 0.2) continue;
        bottom -= high;
        drawn[state] += `M${left.toFixed(1)} ${bottom.toFixed(1)}h${wide.toFixed(1)}v${high.toFixed(1)}h${(-wide).toFixed(1)}z`;
      }
    }
    return ORDER.filter((state) => drawn[state]).map((state) => styled(svg("path", { class: `time-${state}`, d: drawn[state] }), { fill: stateColour(state) }));
  }

  described(runs, last) {
    if (this.name === "job") return `job: ${this.marks.length} marks of events`;
    const now = runs ? SPANS[this.lane.spans.at(-1)[0]] : last ? `${last[0]}${last[2] ? `, ${last[2]}` : ""}` : "nothing known";
    const [all] = joined(this.cells, Infinity);
    return `${this.name}: ${now}${all ? `; ${spoken(all.shares, this.lanes.times)}` : ""}`;
  }

  point(event) {
    const box = this.strip.getBoundingClientRect();
    const x = event.clientX - box.left;
    if (x < -NEAR || x > box.width + NEAR) return hideTip();
    const near = this.marks.filter((mark) => Math.abs(mark.x * box.width - x) <= NEAR).flatMap((mark) => mark.events);
    this.tell(event.clientX, event.clientY, this.lanes.begin + (x / box.width) * this.lanes.length, near, (NEAR / box.width) * this.lanes.length);
  }

  press(event) {
    const rows = [...this.lanes.body.children];
    const here = rows.indexOf(this.element);
    const to = { ArrowDown: rows[here + 1], ArrowUp: rows[here - 1], Home: rows[0], End: rows.at(-1) }[event.key];
    if (to) {
      event.preventDefault();
      to.focus();
    } else if ((event.key === "ArrowRight" || event.key === "ArrowLeft") && this.marks.length) {
      event.preventDefault();
      this.chosen = (this.chosen + (event.key === "ArrowRight" ? 1 : this.chosen < 0 ? 0 : -1) + this.marks.length) % this.marks.length;
      this.draw();
      const mark = this.marks[this.chosen], box = this.strip.getBoundingClientRect();
      this.tell(box.left + mark.x * box.width, box.bottom - 12, mark.events[0].at, mark.events, 0);
    }
  }

  tell(x, y, at, events, reach) {
    const span = this.lane.spans.find(([, from, to]) => from <= at && at <= to);
    const ending = this.lane.endings.find((one) => Math.abs(one[1] - at) <= reach);
    const lines = [el("p", null, el("strong", null, this.name), ` ${clock(at, this.lanes.length)}`)];
    if (span) lines.push(el("p", null, `${SPANS[span[0]]}, ${duration(span[2] - span[1])}`));
    const cell = this.cells.find((one) => one.begin <= at && at <= one.end);
    if (cell) lines.push(el("p", null, `${spoken(cell.shares, this.lanes.times)} of the time from ${clock(cell.begin)} to ${clock(cell.end)}`));
    if (ending && !events.some((event) => event.number === ending[3])) lines.push(el("p", { class: "text" }, `${ending[0]}${ending[2] ? `: ${ending[2]}` : ""}`));
    for (const event of events.slice(0, 4)) {
      lines.push(el("p", { class: "text" }, el("strong", null, event.kind), ` ${event.subject === this.name ? "" : event.subject} ${event.text}`));
      for (const cause of this.lanes.chain(event).slice(0, 4)) lines.push(el("p", { class: "why" }, `because: ${cause.kind} ${cause.subject} ${cause.text.split("\n")[0]}`));
    }
    if (events.length > 4) lines.push(el("p", null, `and ${events.length - 4} more`));
    showTip(x, y, lines);
  }
}

function spoken(shares, times) {
  return Object.entries(shares).sort(([, a], [, b]) => b - a).filter(([, share]) => share >= 0.005).map(([state, share]) => `${percent(share)} ${times.label(state)}`).join(", ");
}

function merged(events, part) {
  const buckets = new Map();
  for (const event of events) {
    const place = Math.round(part(event.at) * BUCKETS);
    const bucket = buckets.get(place);
    if (!bucket) buckets.set(place, { x: part(event.at), trouble: event.trouble, events: [event] });
    else {
      bucket.events.push(event);
      if (event.trouble && !bucket.trouble) Object.assign(bucket, { trouble: true, x: part(event.at) });
    }
  }
  return [...buckets.values()].sort((a, b) => a.x - b.x);
}

function shapes(name, marks, width) {
  if (!marks.length) return null;
  const shape = name.includes("trouble") ? "m0 -6l5.5 10h-11z" : "m-2.6 0a2.6 2.6 0 1 0 5.2 0a2.6 2.6 0 1 0 -5.2 0z";
  return svg("path", { class: name, d: marks.map((mark) => `M${(mark.x * width).toFixed(1)} 10${shape}`).join("") });
}
