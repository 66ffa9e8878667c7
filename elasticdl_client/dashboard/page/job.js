// The page of one job.

import { goodputChart, lossChart, metricsChart, podsChart, rateChart, stateColour } from "./charts.js";
import { card, el, styled, update } from "./dom.js";
import { EventList, History } from "./events.js";
import { ago, bytes, compact, count, duration, number, percent } from "./format.js";
import { badge, bar } from "./jobs.js";
import { Lanes } from "./lanes.js";
import { Logs } from "./logs.js";

const TABS = { overview: "Overview", explain: "Explain", pods: "Pods and servers", events: "Events", logs: "Logs" };
const SHOWN_TROUBLES = 3;
const SHOWN_EPOCHS = 8;

export class JobView {
  constructor(id, act) {
    this.id = id;
    this.act = act;
    this.tab = "overview";
    this.axis = "time";
    this.history = new History();
    this.title = el("div", { class: "title" });
    this.figures = el("div", { class: "facts" });
    this.head = el("div", { class: "head" }, this.title, this.figures);
    this.tabs = el("nav", { class: "tabs", "aria-label": "Parts of the job's page" });
    this.body = el("div");
    this.element = el("div", null, this.head, this.tabs, this.body);
    this.charts = [lossChart(), metricsChart(), rateChart(), podsChart()];
    this.goodput = goodputChart();
    this.goodput.element.classList.add("wide");
    this.lanes = new Lanes((event) => this.history.chain(event));
    this.events = new EventList(this.history);
    this.logs = new Logs(id);
    this.troubles = el("div", { class: "wide" });
    this.sums = el("div");
    this.coverage = el("div");
    this.switch = el("div", { class: "switch", role: "group", "aria-label": "Along" }, ["time", "steps"].map((axis) =>
      el("button", { type: "button", "aria-pressed": String(axis === this.axis), "data-axis": axis, onclick: () => this.along(axis) }, axis)));
    this.life = el("div", { class: "wide tools" }, el("h2", null, "Over its life"), el("span", { class: "grow" }), this.switch);
    this.overview = el("div", { class: "grid" }, this.troubles, this.lanes.element,
      this.life,
      this.charts.map((chart) => chart.element), this.goodput.element, this.sums, this.coverage);
    this.pods = el("div", { class: "grid" });
    this.explain = el("div");
  }

  along(axis) {
    this.axis = axis;
    for (const button of this.switch.children) button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
    this.draw();
  }

  open(tab) {
    this.tab = tab in TABS ? tab : "overview";
    if (this.tab !== "logs") this.logs.close();
    this.draw();
  }

  show(job) {
    this.job = job;
    this.draw();
  }

  take(rows) {
    this.history.add(rows);
    this.draw();
  }

  close() {
    this.logs.close();
  }

  draw() {
    const job = this.job;
    if (!job || document.hidden) return; // a page that is not seen is drawn when it is
    document.title = `${job.name} · ElasticDL`;
    update(this.title, [job.name, job.phase, job.runtime, job.namespace, job.generation, job.actions, this.act.allowed], () => this.heading(job));
    update(this.figures, figuresOf(job), () => figures(job));
    update(this.tabs, this.tab, () => Object.entries(TABS).map(([tab, text]) => el("a", { href: `#/job/${this.id}/${tab}`, "aria-current": tab === this.tab ? "page" : null }, text)));
    const part = { overview: this.overview, explain: this.explain, pods: this.pods, events: this.events.element, logs: this.logs.element }[this.tab];
    if (this.body.firstChild !== part) this.body.replaceChildren(part);
    if (this.tab === "overview") this.drawOverview(job);
    if (this.tab === "explain") update(this.explain, job.diagnoses, () => explainCard(job.diagnoses));
    if (this.tab === "pods") update(this.pods, [job.pods, job.servers, job.devices, job.staleness, job.group, job.engine, job.ps_seconds], () => podCards(job));
    if (this.tab === "events") this.events.show(job.summed_up);
    if (this.tab === "logs") this.logs.show(job.lanes.map((lane) => lane.name), job.phase);
  }

  drawOverview(job) {
    const newest = job.diagnoses.slice(0, SHOWN_TROUBLES);
    update(this.troubles, [newest, job.diagnoses.length], () => newest.length ? card("What went wrong",
      el("a", { href: `#/job/${this.id}/explain` }, job.diagnoses.length > newest.length ? `all ${job.diagnoses.length}` : "why, and what to do"),
      el("ol", { class: "list" }, newest.map((one) => el("li", { class: "diagnosis" }, diagnosisHead(one), el("p", { class: "note" }, sentence(one.why[0] ?? one.advice)))))) : null);
    this.troubles.hidden = !newest.length;
    const times = [...job.lanes.flatMap((lane) => lane.spans.flatMap(([, from, to]) => [from, to])), ...this.history.list.map((event) => event.at)];
    const [begin, until] = times.reduce(([low, high], at) => [Math.min(low, at), Math.max(high, at)], [Infinity, -Infinity]);
    if (times.length) this.lanes.show(job.lanes, job.pod_times, this.history.bySubject, begin, until);
    this.lanes.element.hidden = !times.length;
    for (const chart of this.charts) chart.show(job.series, this.axis);
    this.goodput.show(job.series, "time");
    this.life.hidden = this.charts.every((chart) => chart.element.hidden);
    update(this.sums, [job.worker_seconds, document.documentElement.dataset.theme], () => (job.worker_seconds.length ? card("Workers' time in all", null, stack(job.worker_seconds)) : null));
    update(this.coverage, job.coverage, () => (job.coverage.length ? coverageCard(job.coverage) : null));
    this.sums.hidden = !job.worker_seconds.length;
    this.coverage.hidden = !job.coverage.length;
    this.coverage.classList.toggle("wide", !job.worker_seconds.length);
  }

  heading(job) {
    const buttons = [];
    if (this.act.allowed && job.actions.includes("resume")) buttons.push(el("button", { type: "button", class: "primary", onclick: () => this.act.confirm("resume", job) }, "Resume"));
    if (this.act.allowed && job.actions.includes("scale")) buttons.push(el("button", { type: "button", onclick: () => this.act.confirm("scale", this.job) }, "Scale"));
    if (this.act.allowed && job.actions.includes("delete")) buttons.push(el("button", { type: "button", class: "danger", onclick: () => this.act.confirm("delete", job) }, "Delete"));
    const where = [job.runtime, job.namespace, job.generation > 1 ? `master restarted ${job.generation - 1} ×` : ""];
    return [el("h1", null, job.name), badge(job.phase), el("span", { class: "soft" }, where.filter(Boolean).join(" · ")), el("div", { class: "tools" }, buttons)];
  }
}

function figures(job) {
  const figure = (title, value, small) => el("div", null, el("dt", null, title), el("dd", null, value, el("small", null, small)));
  const metrics = Object.entries(job.metrics).slice(0, 2).map(([name, value]) => figure(name, number(value), `step ${count(job.metrics_step)}`));
  return [
    bar(job),
    job.notes.map((text) => el("p", { class: "note" }, text)),
    job.problem ? el("p", { class: "problem" }, job.problem) : null,
    el("dl", { class: "figures" },
      figure("Records", job.records_total ? percent(job.records_done / job.records_total) : count(job.records_done), job.records_total ? `of ${compact(job.records_total)}` : ""),
      figure("Epoch", job.epoch ? String(job.epoch) : "–", job.num_epochs > 0 ? `of ${job.num_epochs}` : ""),
      figure("Step", count(job.step)), figure("Loss", number(job.loss)), metrics,
      job.phase === "Running" ? figure("Records/s", job.rate ? compact(job.rate) : "–") : null,
      job.eta !== null ? figure("Time left", duration(job.eta), "about") : figure("Took", job.elapsed ? duration(job.elapsed) : "–"),
      figure("Workers", ...alive(job, job.workers)), job.ps[1] ? figure("Servers", ...alive(job, job.ps)) : null,
      figure("Goodput", job.goodput === null ? "–" : percent(job.goodput))),
  ];
}

const alive = (job, [now, wanted]) => (["Running", "Pending"].includes(job.phase) ? [String(now), `of ${wanted}`] : [String(wanted), "wanted"]);

// The part of a job that the figures show: all without a place of its own.
function figuresOf(job) {
  const { lanes, series, pod_times, pods, servers, staleness, coverage, diagnoses, ...rest } = job;
  return rest;
}

function stack(shares) {
  return [
    el("div", { class: "stack" }, shares.map(([state, , share]) => styled(el("i"), { width: `${100 * share}%`, background: stateColour(state) }))),
    el("div", { class: "bars" }, shares.filter(([, , share]) => share >= 0.0005).map(([state, label, share]) => [
      el("span", null, label), styled(el("div", { class: "bar" }), { width: `${100 * share}%`, background: stateColour(state) }), el("span", null, percent(share))])),
  ];
}

function table(heads, rows) {
  return el("div", { class: "scroll" }, el("table", null,
    el("thead", null, el("tr", null, heads.map((head) => el("th", { class: head.startsWith("#") ? "n" : null, scope: "col" }, head.replace("#", ""))))),
    el("tbody", null, rows.map((cells) => el("tr", null, cells)))));
}

const cell = (value, name) => el("td", { class: name ?? null }, value);

function coverageCard(coverage) {
  const more = ["quarantined", "skipped", "filtered", "augmented", "unplanned"].filter((name) => coverage.some((one) => one[name]));
  const rows = coverage.map((one) => [
    cell(one.title), cell(count(one.records), "n"), cell(count(one.committed), "n"), cell(`${one.is_bound ? "≤ " : ""}${count(one.repeated)}`, "n"),
    cell(count(one.lost), one.lost ? "n bad" : "n"), ...more.map((name) => cell(count(one[name]), "n"))]);
  const heads = ["", "#records", `#${coverage[0].verb}`, "#repeated", "#lost", ...more.map((name) => `#${name}`)];
  const older = rows.slice(SHOWN_EPOCHS);
  return card("Coverage", el("span", { class: "soft" }, "what became of each record"), table(heads, rows.slice(0, SHOWN_EPOCHS)),
    older.length ? el("details", null, el("summary", { class: "soft" }, `${older.length} earlier epochs`), table(heads, older)) : null);
}

function diagnosisHead(one) {
  return el("div", null, el("span", { class: "kind" }, one.trouble.replaceAll("_", " ")), el("span", null, one.seen.replace(/\.$/, "")),
    el("span", { class: "soft" }, one.at ? ` · ${ago(one.at)}` : "", one.count > 1 ? ` · ${one.count} times` : ""));
}

const sentence = (text) => text.split("\n")[0];

function explainCard(diagnoses) {
  if (!diagnoses.length) return card("Explain", null, el("p", { class: "note" }, "No trouble is known."));
  const part = (title, ...content) => [el("dt", null, title), el("dd", null, content)];
  return card("Explain", el("span", { class: "soft" }, "newest trouble first, as `elasticdl explain` says it"), el("ol", { class: "list" }, diagnoses.map((one) => el("li", { class: "diagnosis" },
    diagnosisHead(one),
    el("dl", null,
      one.subjects.length > 1 ? part("Of", one.subjects.slice(0, 12).join(", "), one.subjects.length > 12 ? ", …" : "") : null,
      one.why.length ? part("Why", one.why.map((text) => el("div", { class: text.includes("\n") ? "mono text" : "text" }, text))) : null,
      one.done ? part("Done", one.done) : null,
      costOf(one.cost) ? part("Cost", costOf(one.cost)) : null,
      one.advice ? part("To do", one.advice) : null)))));
}

function costOf(cost) {
  return [
    cost.slot_seconds >= 0.05 ? `${cost.slot_seconds.toFixed(1)} s of the pod's time${cost.is_open ? " so far" : ""}` : "",
    cost.repeated ? `${cost.repeated} ${cost.repeated === 1 ? "record" : "records"} computed again`
      : cost.tasks ? `minibatches of ${cost.tasks} ${cost.tasks === 1 ? "task" : "tasks"} were computed again` : "",
    cost.records ? `${count(cost.records)} records left out of the model` : "",
  ].filter(Boolean).join("; ");
}

// The name of a process, in a worker that has several.
const processName = (job, worker, process) => `worker-${worker}${job.processes_per_worker > 1 ? ` process ${process}` : ""}`;
const groupNames = (job) => job.group.map((id) => processName(job, Math.floor(id / job.processes_per_worker), id % job.processes_per_worker));

function podCards(job) {
  const order = { Pending: 0, Failed: 1, Running: 2, Succeeded: 3 };
  const pods = [...job.pods].sort((a, b) => (order[a.phase] ?? 0) - (order[b.phase] ?? 0));
  const cards = [card("Pods", el("span", { class: "soft" }, `${pods.length} shown by the ${job.runtime === "local" ? "machine" : "cluster"}`),
    pods.length ? table(["Pod", "Phase", "#Restarts", "Why"], pods.map((pod) => [cell(pod.name), cell(badge(pod.phase)), cell(String(pod.restarts), "n"), cell(pod.message)])) : el("p", { class: "note" }, "There are none."))];
  cards[0].classList.add("wide");
  if (job.servers.length) {
    const busiest = Math.max(...job.servers.map((server) => server.busy), 0.01);
    cards.push(card("Load of the parameter servers", null, table(["PS", "Busy", "#", "#pushes/s", "#pulls/s", "#in/s", "#out/s", "#rows", "#tables"], job.servers.map((server) => [
      cell(`ps-${server.id}`), el("td", null, styled(el("div", { class: "progress" }, styled(el("i"), { width: `${(100 * server.busy) / busiest}%` })), { margin: "7px 0" })),
      cell(percent(server.busy), "n"), cell(compact(server.pushes_per_second), "n"), cell(compact(server.pulls_per_second), "n"),
      cell(bytes(server.received_per_second), "n"), cell(bytes(server.sent_per_second), "n"), cell(count(server.rows), "n"), cell(bytes(server.table_bytes), "n")]))));
    cards.at(-1).classList.add("wide");
  }
  if (job.devices.length) {
    cards.push(card("Memory of the devices", null, table(["Worker", "Device", "Kind", "#used", "#of"], job.devices.map((device) => [
      cell(processName(job, device.worker, device.process)), cell(device.name), cell(device.kind), cell(bytes(device.used_bytes), "n"), cell(device.total_bytes ? bytes(device.total_bytes) : "", "n")]))));
  }
  if (job.staleness.some((value) => value)) {
    const sum = job.staleness.reduce((a, b) => a + b, 0), most = Math.max(...job.staleness);
    cards.push(card("Staleness", el("span", { class: "soft" }, "updates that a gradient missed"), el("div", { class: "bars" }, job.staleness.map((value, i) => [
      el("span", null, missed(i)), styled(el("div", { class: "bar" }), { width: `${(100 * value) / most}%` }), el("span", null, percent(value / sum))]))));
  }
  if (job.ps_seconds.length) cards.push(card("Servers' time in all", null, stack(job.ps_seconds)));
  if (job.num_groups) cards.push(card("Group", null, el("p", { class: "note" }, job.group.length ? `Group ${job.num_groups} stands, of ${job.group.length}: ${groupNames(job).join(", ")}.${job.engine ? ` It sums by ${job.engine}.` : ""}` : `No group stands; ${job.num_groups} have formed.`)));
  return cards;
}

const missed = (i) => (i < 3 ? String(i) : `${2 ** (i - 2) + 1}–${2 ** (i - 1)}`);
