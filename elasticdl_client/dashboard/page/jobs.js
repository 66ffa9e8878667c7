// The list of all jobs.

import { el, styled, update } from "./dom.js";
import { compact, count, duration, number, percent } from "./format.js";

export class JobsView {
  constructor() {
    this.filter = el("input", { type: "search", placeholder: "Filter jobs", "aria-label": "Filter jobs", oninput: () => this.draw() });
    this.sum = el("span", { class: "soft" });
    this.list = el("ul", { class: "jobs" });
    this.element = el("div", null, el("div", { class: "tools" }, el("h1", null, "Jobs"), this.sum, el("span", { class: "grow" }), this.filter), this.list);
  }

  show({ jobs }) {
    this.jobs = jobs;
    this.draw();
  }

  draw() {
    if (!this.jobs) return;
    const text = this.filter.value.toLowerCase();
    const wanted = this.jobs.filter((job) => `${job.name} ${job.namespace} ${job.phase} ${job.runtime}`.toLowerCase().includes(text));
    const running = this.jobs.filter((job) => job.phase === "Running").length;
    this.sum.replaceChildren(this.jobs.length ? `${this.jobs.length}, ${running} running` : "");
    update(this.list, wanted, () => wanted.length ? wanted.map(row) : el("li", { class: "empty" }, this.jobs.length ? "No job matches." : "No jobs yet. `elasticdl train` starts one; it appears here."));
  }
}

export function badge(phase) {
  return el("span", { class: `badge ${phase}` }, phase);
}

export function bar(job) {
  const part = job.records_total ? Math.min(1, job.records_done / job.records_total) : job.phase === "Succeeded" ? 1 : 0;
  const done = styled(el("i"), { width: `${100 * part}%` });
  return el("div", { class: `progress ${job.phase}`, role: "progressbar", "aria-label": "Progress", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * part) }, done);
}

function row(job) {
  const left = job.eta;
  const share = job.records_total ? percent(job.records_done / job.records_total) : `${count(job.records_done)} records`;
  const pair = (title, value) => el("dl", null, el("dt", null, title), el("dd", null, value));
  const metric = Object.entries(job.metrics)[0];
  return el("li", null, el("a", { href: `#/job/${job.id}` },
    el("div", { class: "first" }, el("span", { class: "name" }, job.name), badge(job.phase),
      el("div", { class: "message" }, job.message || `${job.runtime}${job.namespace ? ` · ${job.namespace}` : ""} · ${job.workers[1]} workers${job.ps[1] ? `, ${job.ps[1]} PS` : ""}`)),
    el("div", { class: "second" }, bar(job), el("span", { class: "soft" }, share, left === null ? "" : `, ${duration(left)} left`)),
    pair(metric ? metric[0] : "loss", metric ? number(metric[1]) : number(job.loss)),
    pair("records/s", job.rate ? compact(job.rate) : "–"),
    pair("goodput", job.goodput === null ? "–" : percent(job.goodput))));
}
