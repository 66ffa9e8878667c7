// Numbers, times and durations as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
export const number = (value) => (value === null || value === undefined ? "–" : digits(value, 4));

// JavaScript writes 0.00002527: 2.53e-5 has the room of a phone.
function digits(value, precision) {
  const isSmall = value !== 0 && Math.abs(value) < 1e-4;
  return isSmall ? Number(value.toPrecision(3)).toExponential() : String(Number(value.toPrecision(precision)));
}

export function compact(value) {
  if (Math.abs(value) < 1000) return digits(value, 3);
  const unit = Math.abs(value) >= 1e9 ? ["G", 1e9] : Math.abs(value) >= 1e6 ? ["M", 1e6] : ["k", 1e3];
  return `${Number((value / unit[1]).toPrecision(3))}${unit[0]}`;
}

export function bytes(value) {
  return value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB` : `${(value / 1e6).toFixed(1)} MB`;
}

export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m ${s % 60}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h ${Math.floor((s % 3600) / 60)}m`;
  return `${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600)}h`;
}

// The time of day, or the date with it where seconds to what it is compared with are more than a day.
export function clock(at, apart = 0) {
  const time = new Date(at * 1000);
  if (apart < 86400) return time.toLocaleTimeString("en-GB");
  return time.toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}

export const ago = (at) => clock(at, Date.now() / 1000 - at);

export function day(at) {
  return new Date(at * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}
