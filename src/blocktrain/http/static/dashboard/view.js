// Shows a status on the page. Everything that came from the server is set as text, never as HTML.
import { textAmount } from "./timeline.js";
import { BLOCK_STATES, ago, bytes, clock, count, finished, nats, percent, plural, span, speed, until } from "./words.js";

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

// Redraws a part only when its facts have changed, so that a reader keeps the place in it.
const drawn = new Map();
export function whenChanged(id, facts, draw) {
  const now = JSON.stringify(facts);
  if (drawn.get(id) === now) return;
  drawn.set(id, now);
  draw(byId(id));
}

export function table(target, caption, heads, rows) {
  const cell = (content, column) => {
    const made = element(column === 0 ? "th" : "td", { "data-label": heads[column], ...(column === 0 ? { scope: "row" } : {}) });
    made.append(content instanceof Node ? content : String(content));
    return made;
  };
  target.replaceChildren(
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map(cell)))),
  );
}

// Relative times, updated every second. `at` is the coordinator's time.
let now_s = () => 0;
export const since = (at_s) => timed(at_s, "since");
const timed = (at_s, kind) => {
  const made = element("span", { "data-at": at_s, "data-kind": kind });
  showTime(made);
  return made;
};
function showTime(made) {
  const away_s = Number(made.dataset.at) - now_s();
  const text = made.dataset.kind === "since" ? ago(-away_s) : until(away_s);
  if (made.textContent !== text) made.textContent = text;
}
export function tick(clock_s) {
  now_s = clock_s;
  document.querySelectorAll("[data-at]").forEach(showTime);
}

export const EXCLUDED = ["banned", "quarantined"];
export const pill = (word, kind = word) => element("span", { class: `pill ${kind.replaceAll(" ", "-")}` }, word);

export function showStatus(status, curves, isAdmin, text_unit) {
  const state = finished(status) ? "finished" : status.paused ? "paused" : status.workers.length ? "training" : "waiting";
  document.title = `${status.name} · BlockTrain`;
  byId("run").textContent = `${status.name} · ${plural(status.blocks.length, "block")} · ${plural(status.num_phases, "phase")}`;
  byId("state").textContent = state;
  byId("state").className = `pill ${state}`;
  byId("state").hidden = false;
  const facts = [status.blocks, status.phases.map((phase) => ({ ...phase, round: phase.round?.leases })), curves.training];
  whenChanged("blocks", facts, (target) => target.replaceChildren(...status.blocks.map((block) => card(block, status, curves))));
  whenChanged("rounds", status.phases.map(withoutSeconds), (target) => showRounds(target, status));
  byId("no-samples").hidden = (status.samples ?? []).length > 0;
  whenChanged("samples", status.samples ?? [], (target) => target.replaceChildren(...[...(status.samples ?? [])].reverse().map(sampleItem)));
  whenChanged("workers", [status.workers, isAdmin, text_unit], (target) => showWorkers(target, status, isAdmin, text_unit));
  byId("no-events").hidden = status.events.length > 0;
  whenChanged("events", status.events, (target) => target.replaceChildren(...[...status.events].reverse().map((event) => eventItem(event, status))));
}

const withoutSeconds = (phase) => phase.round && { ...phase, round: { ...phase.round, time_left_s: 0, reason: reason(phase.round) } };
const reason = (round) => round.reason.replace(/, -?\d+ s left$/, "");

function sampleItem(written) {
  const loss = written.nats_per_byte === null ? "" : ` · ${nats(written.nats_per_byte)} nats/byte`;
  return element("li", {},
    element("p", { class: "hint" }, `${clock(written.at_s)}${loss}`),
    ...written.samples.map((sample) => element("p", { class: "sample" }, element("span", { class: "prompt" }, sample.prompt), sample.text)));
}

// The picture of the model

function card(block, status, curves) {
  const phases = status.phases.filter((phase) => phase.round && phase.blocks.includes(block.block));
  const leases = phases.flatMap((phase) => phase.round.leases);
  const losses = curves.training.filter((curve) => curve.blocks.includes(block.block)).flatMap((curve) => curve.points)
    .sort((one, other) => one.at_s - other.at_s).map((point) => point.nats_per_byte);
  const version = block.version === null ? "" : `version ${block.version}`;
  return element("li", { class: `block ${block.state}` },
    element("h3", {}, `Block ${block.block}`, element("span", { class: "version" }, version)),
    element("p", {}, pill(BLOCK_STATES[block.state] ?? block.state, block.state), ` ${plural(block.layers, "layer")}`),
    losses.length > 1 ? sparkline(losses) : null,
    losses.length ? element("p", { class: "loss" }, `training loss ${nats(losses[losses.length - 1])}`) : null,
    leases.length ? element("p", {}, tally(leases)) : null,
    leases.length ? crew(leases, status) : null,
    ...leases.filter((lease) => lease.late).map((lease) => element("p", { class: "why" }, `${alias(status, lease.worker)}: ${lease.late}`)));
}

// Who trains this block now
const MOST_NAMES = 6;
function crew(leases, status) {
  const named = leases.slice(0, MOST_NAMES).map((lease) =>
    element("li", { class: dot(lease) }, element("i", { class: `dot ${dot(lease)}`, "aria-hidden": "true" }), alias(status, lease.worker)));
  const more = leases.length - named.length;
  return element("ul", { class: "crew", "aria-label": "Workers in the open round" }, ...named, more > 0 ? element("li", {}, `and ${count(more)} more`) : null);
}

const dot = (lease) => (lease.reported_s !== null ? "reported" : lease.late ? "late" : "working");

function tally(leases) {
  const kinds = leases.map(dot);
  const parts = ["working", "reported", "late"].map((kind) => [kinds.filter((each) => each === kind).length, kind]).filter(([number]) => number);
  return parts.map(([number, kind]) => `${number} ${kind}`).join(", ");
}

function sparkline(losses) {
  const [low, high] = [Math.min(...losses), Math.max(...losses)];
  const point = (loss, index) => `${(100 * index) / (losses.length - 1)},${28 - (26 * (loss - low)) / (high - low || 1)}`;
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", role: "img" })) svg.setAttribute(key, value);
  svg.setAttribute("aria-label", `Training loss from ${nats(losses[0])} to ${nats(losses[losses.length - 1])} nats/byte over ${plural(losses.length, "round")}`);
  const base = document.createElementNS(SVG, "line");
  for (const [key, value] of Object.entries({ x1: 0, x2: 100, y1: 30, y2: 30 })) base.setAttribute(key, value);
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", `M${losses.map(point).join("L")}`);
  svg.append(base, path);
  return svg;
}

const alias = (status, id) => status.workers.find((worker) => worker.id === id)?.alias ?? "a worker";

// Tables

function showRounds(target, status) {
  const rows = status.phases.map((phase) => {
    const steps = `${count(phase.step)} of ${count(phase.steps)}`;
    const blocks = phase.blocks.join(", ");
    if (!phase.round) return [`Phase ${phase.phase + 1}`, blocks, steps, "–", "–", "finished"];
    const { round } = phase;
    const due = round.leases.length ? timed(status.now_s + round.time_left_s, "until") : "starts with the first worker";
    const again = round.extensions ? `, extended ${plural(round.extensions, "time")}` : "";
    const why = element("span", {}, reason(round), element("small", {}, `time limit ${span(round.limit_s)}: ${round.limit_reason}${again}`));
    return [`Phase ${phase.phase + 1}`, blocks, steps, count(round.number), due, why];
  });
  target.className = "wide";
  table(target, "The open round of each phase, its deadline and what it waits for", ["phase", "blocks", "steps", "round", "deadline", "reason"], rows);
  lastColumnWhole(target);
}

function showWorkers(target, status, isAdmin, text_unit) {
  const all = status.workers.reduce((sum, worker) => sum + worker.tokens, 0);
  const ranked = [...status.workers].sort((one, other) => other.tokens - one.tokens);
  const rows = ranked.map((worker, index) => [
    element("span", {}, element("span", { class: "rank" }, `${index + 1}. `), worker.alias, isAdmin ? element("small", {}, worker.name) : null),
    worker.device,
    speed(worker.steps_per_s),
    contribution(worker, all, text_unit),
    `${bytes(worker.update_bytes)} / ${bytes(worker.down_bytes)}`,
    since(worker.last_seen_s),
    element("span", {}, pill(worker.state), worker.why ? element("small", {}, worker.why) : null, standing(worker, status)),
  ]);
  target.className = "wide";
  const caption = status.workers.length
    ? `${plural(status.workers.length, "worker")}, named after their keys, most text first${isAdmin ? "; below, the names they gave themselves, which only admins see" : ""}`
    : "No worker has joined yet";
  table(target, caption, ["worker", "device", "steps/s", "contribution", "up / down", "last seen", "state"], rows);
  lastColumnWhole(target);
}

// What others have found about a worker. Without audits all workers count the same, and there is nothing to say.
function standing(worker, status) {
  if (EXCLUDED.includes(worker.state) || !status.audits?.share) return null;
  const passed = worker.audits_passed ? `${plural(worker.audits_passed, "audit")} passed` : "not audited yet";
  const weight = worker.weight < 1 ? `; its updates weigh ${percent(worker.weight)}` : "";
  return element("small", {}, `${worker.suspected ? "disputed by another worker, " : ""}${passed}${weight}`);
}

function lastColumnWhole(target) {
  for (const row of target.tBodies[0].rows) row.lastElementChild.classList.add("whole");
}

function contribution(worker, all, text_unit) {
  const share = all ? worker.tokens / all : 0;
  const bar = element("i");
  bar.style.width = `${100 * share}%`;
  return element("span", {}, `${percent(share)} · ${plural(worker.updates, "update")}`, element("small", {}, `${textAmount(worker.tokens, text_unit)} of text`), element("span", { class: "share", "aria-hidden": "true" }, bar));
}

// Events name workers by alias

export function eventText(event, status) {
  const worker = status.workers.find((each) => each.id === event.data.worker);
  if (event.kind === "joined" && worker) return `${worker.alias}, ${worker.device}`;
  if (event.kind === "late") return `${alias(status, event.data.worker)} in phase ${event.data.phase + 1}, round ${event.data.round}: the round closed without its update`;
  return worker ? `${worker.alias}: ${event.text}` : event.text;
}

function eventItem(event, status) {
  const kind = ["late", "refused", "extended", "paused", "disputed", ...EXCLUDED].includes(event.kind) ? event.kind : "quiet";
  return element("li", {},
    element("time", { datetime: new Date(event.at_s * 1000).toISOString() }, clock(event.at_s)),
    pill(event.kind, kind),
    element("span", {}, eventText(event, status)));
}
