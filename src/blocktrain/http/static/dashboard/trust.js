// Who is excluded and why, and what audits have found. The section is there only if there is something to say.
import { EXCLUDED, element, pill, since, table, whenChanged } from "./view.js";
import { count, percent, plural } from "./words.js";

const byId = (id) => document.getElementById(id);
const OUTCOMES = ["passed", "failed", "undecided", "open"];

export function showTrust(status) {
  const audits = status.audits ?? { share: 0, passed: 0, failed: 0, undecided: 0, open: 0, newest: [] };
  const out = status.workers.filter((worker) => EXCLUDED.includes(worker.state));
  const total = OUTCOMES.reduce((sum, outcome) => sum + audits[outcome], 0);
  byId("trust").hidden = !out.length && !total && !audits.share;
  const rule = audits.share ? `${percent(audits.share)} of the updates are computed again by other workers` : "Audits are switched off";
  byId("trust-text").textContent = total ? `${rule}: ${outcomes(audits)}.` : `${rule}${audits.share ? "; none yet" : ""}.`;
  whenChanged("trust-bar", audits, (target) => showBar(target, audits, total));
  whenChanged("excluded", out.map((worker) => [worker.alias, worker.state, worker.why]), (target) => showExcluded(target, out));
  whenChanged("audits", audits.newest, (target) => showAudits(target, audits.newest, status));
}

const outcomes = (audits) => OUTCOMES.filter((outcome) => audits[outcome]).map((outcome) => `${count(audits[outcome])} ${outcome}`).join(", ");

function showBar(target, audits, total) {
  target.hidden = !total;
  target.setAttribute("aria-label", `Audits: ${outcomes(audits)}`);
  target.replaceChildren(...OUTCOMES.filter((outcome) => audits[outcome]).map((outcome) => {
    const part = element("i", { class: outcome, title: `${count(audits[outcome])} ${outcome}` });
    part.style.flexGrow = audits[outcome];
    return part;
  }));
}

function showExcluded(target, out) {
  target.className = "wide";
  const caption = out.length ? `${plural(out.length, "worker")} excluded: no work, and what waits to be merged is left out` : "No worker is excluded";
  table(target, caption, ["worker", "state", "reason"], out.map((worker) => [worker.alias, pill(worker.state), worker.why || "no reason given"]));
}

function showAudits(target, newest, status) {
  target.className = "wide";
  const name = (id) => status.workers.find((worker) => worker.id === id)?.alias ?? "a worker";
  table(target, newest.length ? "The newest audits" : "No audit has ended yet", ["audited worker", "phase, round", "outcome", "ended"],
    newest.map((audit) => [name(audit.worker), `${audit.phase + 1}, ${audit.round}`, pill(audit.outcome), since(audit.closed_s)]));
}
