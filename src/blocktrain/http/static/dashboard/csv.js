// Data as CSV files, made in the page.

const cell = (value) => (/[",\n\r]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
// A spreadsheet would run a text that begins like a formula.
const harmless = (value) => (typeof value === "string" && /^[=+\-@\t]/.test(value) ? `'${value}` : value);

export const csv = (heads, rows) => [heads, ...rows].map((row) => row.map((value) => cell(harmless(value ?? ""))).join(",")).join("\n") + "\n";

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export function heldOutCsv(points) {
  const blocks = [...new Set(points.flatMap((point) => Object.keys(point.blocks)))].sort((a, b) => a - b);
  return csv(["time_s", "composed_nats_per_byte", ...blocks.map((block) => `block_${block}`)],
    points.map((point) => [point.at_s, point.nats_per_byte, ...blocks.map((block) => point.blocks[block])]));
}

export const trainingCsv = (curves) =>
  csv(["phase", "round", "step", "time_s", "nats_per_byte", "updates", "tokens"],
    curves.flatMap((curve) => curve.points.map((p) => [curve.phase + 1, p.round, p.step, p.at_s, p.nats_per_byte, p.updates, p.tokens])));

export const workersCsv = (workers) =>
  csv(["worker", "device", "steps_per_s", "updates", "tokens", "update_bytes", "down_bytes", "last_seen_s", "state", "audits_passed"],
    workers.map((w) => [w.alias, w.device, w.steps_per_s, w.updates, w.tokens, w.update_bytes, w.down_bytes, w.last_seen_s, w.state, w.audits_passed]));
