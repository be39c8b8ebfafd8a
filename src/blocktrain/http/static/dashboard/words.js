// Numbers and times as people read them. Pure.

export const count = (number) => number.toLocaleString("en", { maximumFractionDigits: 0 });
export const nats = (number) => number.toFixed(3);
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) [number, unit] = [number / 1000, unit + 1];
  return `${unit === 0 || number >= 100 ? Math.round(number) : number.toPrecision(3)} ${units[unit]}`;
}

export function span(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 90) return `${whole} s`;
  if (whole < 5400) return `${Math.round(whole / 60)} min`;
  return whole < 172800 ? `${Math.round(whole / 3600)} h` : `${Math.round(whole / 86400)} days`;
}

export const ago = (seconds) => (seconds < 2 ? "just now" : `${span(seconds)} ago`);
export const until = (seconds) => (seconds >= 0 ? `in ${span(seconds)}` : `${span(-seconds)} ago`);
export const clock = (at_s) => new Date(at_s * 1000).toLocaleTimeString("en-GB");
export const speed = (steps) => (steps ? steps.toLocaleString("en", { maximumSignificantDigits: 3 }) : "unknown");

export const finished = (status) => status.phases.filter((phase) => phase.finished).length === status.num_phases;

export const BLOCK_STATES = {
  planned: "not started", scaffold: "training as a helper", training: "training", waiting: "waiting for its phase", frozen: "trained",
};
