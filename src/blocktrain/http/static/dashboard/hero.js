// The top of the page: what to do when nobody has joined, the figures of the moment, the phases, the newest sample.
import { EXCLUDED, element } from "./view.js";
import { textAmount, textPerSecond } from "./timeline.js";
import { bytes, clock, count, finished, nats, percent, span } from "./words.js";

const byId = (id) => document.getElementById(id);

export function showHero(status, curves, text_unit) {
  byId("waiting").hidden = status.workers.length > 0 || finished(status);
  const counts = (worker) => (finished(status) ? worker.updates > 0 : !["away", "late", ...EXCLUDED].includes(worker.state));
  const here = status.workers.filter(counts).length;
  const late = status.workers.filter((worker) => worker.state === "late").length;
  const out = status.workers.filter((worker) => EXCLUDED.includes(worker.state)).length;
  byId("present").textContent = count(here);
  const what = finished(status) ? "took part" : `active now, of ${count(status.workers.length)}`;
  byId("present-of").textContent = `${what}${late ? `; ${count(late)} late` : ""}${out ? `; ${count(out)} excluded` : ""}`;
  byId("up").textContent = bytes(status.traffic.up_bytes);
  byId("down").textContent = bytes(status.traffic.down_bytes);
  byId("down-since").textContent = `since the coordinator started at ${clock(status.traffic.down_since_s)}`;
  const shortage = status.storage?.problem ?? "";
  byId("shortage").textContent = shortage && `${shortage.charAt(0).toUpperCase()}${shortage.slice(1)}. Until then nothing more is taken in.`;
  byId("shortage").hidden = !shortage;
  showTimeLeft(status);
  showRate(status, curves, text_unit);
  showPhases(status);
  showNewest(status);
}

function showTimeLeft(status) {
  const known = status.time_left_s !== null && status.time_left_s !== undefined;
  byId("time-left").textContent = finished(status) ? "none" : known ? span(status.time_left_s) : "–";
  byId("time-left-of").textContent = finished(status) ? "every phase is trained; blocktrain export downloads the model" : status.paused ? "the run is paused" : known ? "at the speed of the last rounds" : "known when a round has closed";
}

function showRate(status, curves, text_unit) {
  const rate = textPerSecond(curves);
  const [amount, unit] = rate === null ? ["–", ""] : textAmount(rate, text_unit).split(" ");
  byId("rate").textContent = amount;
  const whose = finished(status) || status.paused ? "in the last rounds" : "all workers together";
  byId("rate-of").textContent = rate === null ? "known after two rounds" : `${unit}/s, ${whose}`;
}

export function showLoss(heldOut) {
  const [first, last] = [heldOut[0], heldOut[heldOut.length - 1]];
  byId("loss").textContent = last ? nats(last.nats_per_byte) : "–";
  byId("loss-of").textContent = !last ? "known after the first evaluation" : heldOut.length > 1 ? `nats/byte, composed model; at first ${nats(first.nats_per_byte)}` : "nats/byte, composed model";
}

function showPhases(status) {
  const opened = new Map(status.phases.map((phase) => [phase.phase, phase]));
  const done = status.phases.reduce((sum, phase) => sum + phase.step, 0);
  byId("progress").textContent = percent(done / status.steps);
  byId("progress-steps").textContent = `${count(done)} of ${count(status.steps)} steps`;
  const plan = status.plan ?? status.phases;
  byId("phases").replaceChildren(...plan.map((planned, index) => {
    const phase = opened.get(index);
    const share = phase ? phase.step / phase.steps : 0;
    const bar = element("i");
    bar.style.width = `${100 * share}%`;
    const blocks = `${planned.blocks.length > 1 ? "blocks" : "block"} ${planned.blocks.join(", ")}`;
    const state = phase?.finished ? "done" : phase ? `step ${count(phase.step)} of ${count(phase.steps)}` : `${count(planned.steps)} steps`;
    const item = element("li", { class: phase && !phase.finished ? "now" : "" },
      element("span", { class: "track", "aria-hidden": "true" }, bar),
      element("span", { class: "label" }, element("span", {}, `Phase ${index + 1}`), " · ", element("span", {}, blocks), " · ", element("span", {}, state)));
    item.style.flexGrow = planned.steps;
    return item;
  }));
}

function showNewest(status) {
  const newest = (status.samples ?? [])[(status.samples ?? []).length - 1]?.samples?.[0];
  byId("newest").hidden = !newest;
  if (newest) byId("newest").replaceChildren(element("span", { class: "prompt" }, newest.prompt), newest.text);
}
