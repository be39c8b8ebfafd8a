// Where every point of a chart lies: on one axis for all charts, from the start of the run. Pure.
import { bytes, count } from "./words.js";

const UNITS = [[172800, 86400, "days"], [7200, 3600, "hours"], [180, 60, "minutes"], [0, 1, "seconds"]];

// All closed rounds in the order of time, with the steps and the text of the whole run up to each. A long curve has only
// every n-th round: a round then stands for those before it that are missing.
function rounds(curves, status) {
  const all = curves.training.flatMap((curve) => curve.points.map((point, index) => {
    const next = curve.points[index + 1]?.step ?? status?.phases.find((phase) => phase.phase === curve.phase)?.step ?? point.step;
    const stands_for = point.round - (curve.points[index - 1]?.round ?? -1);
    return { at_s: point.at_s, steps: Math.max(0, next - point.step), text: point.tokens * stands_for };
  })).sort((one, other) => one.at_s - other.at_s);
  let [steps, text] = [0, 0];
  return all.map((round) => ({ at_s: round.at_s, steps: (steps += round.steps), text: (text += round.text) }));
}

const last = (list) => list[list.length - 1];

export function axisOf(kind, curves, status, text_unit) {
  const done = rounds(curves, status);
  const joined_s = (status?.workers ?? []).map((worker) => worker.first_seen_s); // a run may have waited for days
  const began_s = joined_s.length ? Math.min(...joined_s) : 0;
  if (kind === "time") {
    const newest_s = Math.max(0, ...[last(done)?.at_s, last(curves.heldOut)?.at_s].filter(Boolean).map((at_s) => at_s - began_s));
    const [, unit_s, name] = UNITS.find(([least_s]) => newest_s >= least_s);
    return { at: (point) => (point.at_s - began_s) / unit_s, title: `${name} since the first worker joined`, most: newest_s / unit_s, digits: 1 };
  }
  const by = (at_s) => {
    let [low, high] = [0, done.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (done[middle].at_s <= at_s + 1e-6) low = middle + 1;
      else high = middle;
    }
    return low ? done[low - 1][kind] : 0;
  };
  const title = kind === "steps" ? "steps of the run" : `${text_unit} of text read`;
  return { at: (point) => by(point.at_s), title, most: last(done)?.[kind] ?? 0, digits: 0 };
}

// How much text all workers together read per second, over the newest rounds; null before the second round.
export function textPerSecond(curves, recent = 12) {
  const newest = rounds(curves, null).slice(-recent);
  const [first, end] = [newest[0], last(newest)];
  return newest.length > 1 && end.at_s > first.at_s ? (end.text - first.text) / (end.at_s - first.at_s) : null;
}

export const textAmount = (amount, text_unit) => (text_unit === "bytes" ? bytes(amount) : `${count(amount)} ${text_unit}`);

// Exponential moving average, corrected for its start
export function smoothed(values, memory) {
  let [sum, weight] = [0, 0];
  return memory ? values.map((value) => ([sum, weight] = [memory * sum + value, memory * weight + 1])[0] / weight) : values;
}

// A loss axis with room around the values, also if there is only one
export function lossRange(values, logarithmic) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = Math.max((high - low) * 0.06, 0.02);
  const range = [Math.max(low - room, logarithmic ? low * 0.9 : 0), high + room];
  return logarithmic ? range.map((value) => Math.log10(Math.max(value, 1e-4))) : range;
}
