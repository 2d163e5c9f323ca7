// Texts for values.

export const count = (n) => n.toLocaleString("en");

export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

// duration formats seconds with at most three significant digits.
export function duration(seconds) {
  const digits = (value) => (value >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));
  if (seconds >= 3600) return `${digits(seconds / 3600)} h`;
  if (seconds >= 120) return `${digits(seconds / 60)} min`;
  if (seconds >= 1) return `${digits(seconds)} s`;
  if (seconds >= 1e-3) return `${digits(seconds * 1e3)} ms`;
  return seconds > 0 && seconds < 1e-6 ? "under 1 µs" : `${digits(seconds * 1e6)} µs`;
}

// age formats the time that has passed, by the proxy's clock.
export function age(time, now) {
  const seconds = Math.max(0, (Date.parse(now) - Date.parse(time)) / 1000);
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const clock = (time) => new Date(time).toLocaleTimeString("en-GB");

export const hostPort = (address, port) => (address.includes(":") ? `[${address}]:${port}` : `${address}:${port}`);

const stateTones = { ready: "good", terminating: "warn", "not ready": "bad", ejected: "bad", gone: "quiet" };

export const stateTone = (state) => stateTones[state] ?? "quiet";

const decisionTones = { forward: "good", reject: "bad", drop: "bad", pass: "quiet" };

export const decisionTone = (decision) => decisionTones[decision] ?? "quiet";

const verdictTones = {
  works: "good", "partly drops": "warn", "partly rejects": "warn", "no frontends": "warn", drops: "bad", "no endpoints": "bad", failed: "bad",
};

export const verdictTone = (verdict) => verdictTones[verdict] ?? "quiet";

// bytes formats a number of bytes in powers of 1000.
export function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (n >= 999.5 && unit < units.length - 1) {
    n /= 1000;
    unit++;
  }
  return `${n >= 100 || unit === 0 ? n.toFixed(0) : Number(n.toPrecision(3))} ${units[unit]}`;
}
