// Charts over a job's run.  A chart is made once and then given new data; another theme makes it again.

import { colour, el } from "./dom.js";
import { clock, compact, number, percent } from "./format.js";

const HEIGHT = 180;
const LINES = ["blue", "orange", "green", "purple", "red", "sky"];

// The states of a worker's time, useful first; the others in an order in which neighbours differ.
export const STATES = {
  useful: "blue", repeated: "red", recovering: "yellow", waiting_group: "purple", waiting_ps: "sky", input: "green",
  evaluating: "teal", saving: "brown", starting: "orange", unscheduled: "wait", idle: "gray", stopped: "bar", master_away: "soft", unknown: "line",
};
export const stateColour = (state) => colour(STATES[state] ?? { busy: "blue", restoring: "orange", absent: "wait" }[state] ?? "gray");

export class Chart {
  // title; lines(series) gives [{label, values, fill}]; format of a value; x: whether steps can be chosen instead of time.
  constructor(title, { lines, format = number, range = null, bars = false }) {
    this.lines = lines;
    this.format = format;
    this.range = range;
    this.stacked = bars;
    this.place = el("div", { class: "chart" });
    this.keys = el("div", { class: "keys" });
    this.element = el("section", { class: "card" }, el("header", null, el("h2", null, title), this.keys), this.place);
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(this.place);
  }

  // A chart that is in no page yet has no width: it is drawn when it gets one.
  fit() {
    const width = this.place.clientWidth;
    if (!width || !this.newest) return;
    if (!this.plot) this.show(...this.newest);
    else if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
  }

  show(series, axis) {
    this.newest = [series, axis];
    const { x, lines } = this.lines(series, axis);
    const shape = JSON.stringify([axis, lines.map((line) => line.label), document.documentElement.dataset.theme]);
    this.element.hidden = lines.length === 0 || x.length < 2;
    if (this.element.hidden || !this.place.clientWidth) return;
    const data = [x, ...lines.map((line) => line.values)];
    if (shape !== this.shape || !this.plot) this.make(shape, lines, data, axis);
    else this.plot.setData(data);
    this.keys.replaceChildren(...lines.toReversed().map((line, i) => this.key(line, data[0].length - 1, lines.length - 1 - i)));
  }

  key(line, last, index) {
    const i = el("i");
    i.style.background = this.paint(line, index);
    const values = line.shown ?? line.values;
    return el("span", null, i, `${line.label} ${this.format(values.findLast((value) => value !== null) ?? null)}`);
  }

  paint(line, index) {
    return line.colour ?? colour(LINES[index % LINES.length]);
  }

  make(shape, lines, data, axis) {
    this.plot?.destroy();
    this.shape = shape;
    const soft = colour("soft"), rule = colour("line");
    const axes = { stroke: soft, grid: { stroke: rule, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: this.place.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { points: { size: 6 }, y: false, drag: { x: true, y: false } },
      padding: [8, 28, 0, 0], // right: half of the last time
      scales: { x: { time: axis === "time" }, y: { range: this.range ?? ((_, low, high) => [Math.min(0, low), high > 0 ? high * 1.08 : 1]) } },
      axes: [
        { ...axes, size: 26, space: 80, values: (_, ticks) => ticks.map((tick) => (axis === "time" ? clock(tick, ticks.at(-1) - ticks[0]) : compact(tick))) },
        { ...axes, size: 52, values: (_, ticks) => ticks.map((tick) => this.stacked ? percent(tick) : compact(tick)) },
      ],
      series: [{}, ...lines.map((line, i) => this.line(line, i))],
      hooks: { setCursor: [(plot) => this.hover(plot, axis)] },
    };
    this.place.replaceChildren();
    this.plot = new uPlot(options, data, this.place);
    this.note = el("div", { class: "keys" });
    this.place.append(this.note);
    this.current = lines;
  }

  line(line, i) {
    const paint = this.paint(line, i);
    if (this.stacked) return { label: line.label, stroke: paint, fill: paint, width: 0, points: { show: false } };
    return { label: line.label, stroke: paint, width: 1.8, spanGaps: true, points: { show: line.values.length < 30, size: 5, fill: paint } };
  }

  hover(plot, axis) {
    const i = plot.cursor.idx;
    if (i === null || i === undefined || plot.cursor.left < 0) return this.note?.replaceChildren();
    const [times] = plot.data;
    const at = times[i];
    const values = this.current.map((line) => `${line.label} ${this.format((line.shown ?? line.values)[i])}`);
    this.note.replaceChildren(`${axis === "time" ? clock(at, times.at(-1) - times[0]) : `step ${at}`}: ${values.toReversed().join(", ")}`);
  }
}

// Points in order of steps, each step once: uPlot requires this of its x.
function bySteps(series, take) {
  const keep = series.step.map((step, i) => i + 1 === series.step.length || series.step[i + 1] > step).map((is, i) => (is ? i : -1)).filter((i) => i >= 0);
  return { x: keep.map((i) => series.step[i]), pick: (values) => keep.map((i) => values[i]), take };
}

function along(series, axis) {
  if (axis === "steps") return bySteps(series);
  return { x: series.at, pick: (values) => values };
}

export function lossChart() {
  return new Chart("Loss", {
    range: (_, low, high) => (low === high ? [low - 1, high + 1] : [Math.min(low, Math.max(0, low - (high - low) * 0.1)), high + (high - low) * 0.08]),
    lines: (series, axis) => {
      const { x, pick } = along(series, axis);
      return { x, lines: series.loss.some((value) => value !== null) ? [{ label: "loss", values: pick(series.loss) }] : [] };
    },
  });
}

export function metricsChart() {
  return new Chart("Metrics of evaluations", {
    range: (_, low, high) => (high <= 1 && low >= 0 ? [0, 1] : [low - (high - low || 1) * 0.1, high + (high - low || 1) * 0.1]),
    lines: (series, axis) => {
      const first = series.metrics_step.map((step, i) => (step > 0 && step !== series.metrics_step[i - 1] ? i : -1)).filter((i) => i >= 0);
      const x = first.map((i) => (axis === "steps" ? series.metrics_step[i] : series.at[i]));
      return { x, lines: Object.entries(series.metrics).map(([label, values]) => ({ label, values: first.map((i) => values[i]) })) };
    },
  });
}

export function rates(series) {
  return series.at.map((at, i) => {
    if (i === 0) return null;
    let j = i - 1;
    while (j > 0 && at - series.at[j] < 3) j -= 1; // a status a second is too short for a rate
    const took = at - series.at[j];
    return took > 0 ? Math.max(0, series.records[i] - series.records[j]) / took : null;
  });
}

export function rateChart() {
  return new Chart("Records per second", {
    format: (value) => (value === null ? "–" : compact(value)),
    lines: (series, axis) => {
      const { x, pick } = along(series, axis);
      return { x, lines: series.at.length ? [{ label: "records/s", values: pick(rates(series)) }] : [] };
    },
  });
}

export function podsChart() {
  return new Chart("Workers and parameter servers", {
    format: (value) => (value === null ? "–" : String(value)),
    lines: (series, axis) => {
      const { x, pick } = along(series, axis);
      const lines = [{ label: "workers", values: pick(series.workers) }];
      if (series.ps.some((value) => value > 0)) lines.push({ label: "PS", values: pick(series.ps) });
      if (series.ps_busy.some((value) => value > 0)) lines.push({ label: "busy threads of PS", values: pick(series.ps_busy) });
      return { x, lines };
    },
  });
}

export function goodputChart() {
  return new Chart("Where the workers' time goes", {
    format: (value) => (value === null || value === undefined ? "–" : percent(value)),
    range: [0, 1],
    bars: true,
    lines: (series) => {
      const known = Object.keys(STATES);
      const states = Object.keys(series.seconds).filter((state) => series.seconds[state].some((value) => value > 0));
      states.sort((a, b) => known.indexOf(a) - known.indexOf(b));
      const shares = states.map(() => []);
      series.at.forEach((_, i) => {
        const spent = states.map((state) => (i ? Math.max(0, series.seconds[state][i] - series.seconds[state][i - 1]) : 0));
        const sum = spent.reduce((a, b) => a + b, 0);
        states.forEach((_, j) => shares[j].push(sum > 0 ? spent[j] / sum : null));
      });
      // The sum of a state and of those before it; the largest sum is painted first, and the others over it.
      const sums = shares.map((_, j) => series.at.map((_, i) => (shares[0][i] === null ? null : shares.slice(0, j + 1).reduce((a, one) => a + one[i], 0))));
      const lines = states.map((state, j) => ({ label: series.labels[state], values: sums[j], shown: shares[j], colour: stateColour(state) }));
      return { x: series.at, lines: lines.toReversed() };
    },
  });
}
