// The dashboard: keeps the access token, follows /v1/stream, and shows when it is out of date. Admins can pause the run.
// hero.js, view.js, trust.js and charts.js do the drawing.
import { drawCharts } from "./charts.js";
import { download, heldOutCsv, trainingCsv, workersCsv } from "./csv.js";
import { showHero, showLoss } from "./hero.js";
import { showSettings, textUnit } from "./settings.js";
import { showTrust } from "./trust.js";
import { EXCLUDED, eventText, showStatus, tick } from "./view.js";
import { nats, span } from "./words.js";

const byId = (id) => document.getElementById(id);
const TOKEN = "blocktrain-token"; // in sessionStorage: gone with the tab
const SILENCE_MS = 25_000; // the coordinator says something every 10 s
const FIRST_PAUSE_MS = 1000, LONGEST_PAUSE_MS = 30_000;

let role = null;
let status = null;
let spec = null; // the run's settings
let heardAt = 0; // by performance.now()
let curves = { training: [], heldOut: [] };
let connection = null; // the AbortController of the stream under way
let visit = 0; // counts sign-ins; a loop of an older one ends

// The access token

const token = () => sessionStorage.getItem(TOKEN);

// `given` is an access token, or an invite, which ends in # and the access token
function keep(given) {
  const found = /([\w-]+)'?\s*$/.exec(given);
  sessionStorage.setItem(TOKEN, found ? found[1] : "none");
}

function takeTokenFromAddress() {
  if (location.hash.length < 2) return;
  keep(location.hash);
  history.replaceState(null, "", location.pathname); // so that no bookmark, history or screenshot shows it
}

function askForToken(problem = "") {
  sessionStorage.removeItem(TOKEN);
  showProblem(problem);
  byId("main").hidden = true;
  byId("sign-in").hidden = false;
  show("", "Not connected");
  byId("token").value = "";
  byId("token").focus();
}

// Requests

const ask = (path, options = {}) => fetch(path, { ...options, cache: "no-store", headers: { Authorization: `Bearer ${token()}` } });

class CoordinatorError extends Error {
  constructor(message, response) {
    super(message);
    this.status = response.status;
    this.after_ms = 1000 * Number(response.headers.get("Retry-After") ?? 0);
  }
}

async function asked(path, options) {
  const response = await ask(path, options);
  if (response.ok) return response;
  const problem = await response.json().catch(() => null);
  throw new CoordinatorError(problem?.message ?? `the coordinator answered with status ${response.status}`, response);
}

function showProblem(text) {
  const sentence = text && text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
  byId("problem").textContent = sentence;
  byId("problem").hidden = !text;
}

function show(lamp, text) {
  byId("lamp").className = lamp;
  if (byId("connection-text").textContent !== text) byId("connection-text").textContent = text;
}

const say = (text) => { byId("news").textContent = text; };

// The event stream

async function* events(response, heard) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    const parts = (kept + value).split("\n\n");
    kept = parts.pop();
    for (const part of parts) {
      const name = /^event: (.*)$/m.exec(part);
      const data = /^data: (.*)$/m.exec(part);
      if (name && data) yield [name[1], JSON.parse(data[1])];
    }
  }
}

async function listenOnce() {
  connection = new AbortController();
  let silence = 0;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => connection.abort(), SILENCE_MS);
  };
  try {
    heard();
    role = (await (await asked("v1/role", { signal: connection.signal })).json()).role;
    const response = await asked("v1/stream", { signal: connection.signal });
    welcome();
    for await (const [name, data] of events(response, heard)) {
      if (name === "status") take(data);
      if (name === "curves") takeCurves(data);
    }
  } finally {
    clearTimeout(silence);
  }
}

async function listen(mine) {
  let pause_ms = FIRST_PAUSE_MS;
  const current = () => mine === visit && token();
  while (current()) {
    const began = performance.now();
    let least_ms = 0;
    try {
      await listenOnce();
    } catch (error) {
      if (!current()) return;
      if (error instanceof CoordinatorError && error.status === 401) return askForToken(error.message);
      if (error instanceof CoordinatorError) [least_ms] = [error.after_ms, showProblem(error.message)];
    }
    if (performance.now() - began > LONGEST_PAUSE_MS) pause_ms = FIRST_PAUSE_MS;
    if (!current()) return;
    await stale(current, Math.max(least_ms, pause_ms * (0.75 + Math.random() / 2)));
    pause_ms = Math.min(2 * pause_ms, LONGEST_PAUSE_MS);
  }
}

async function stale(current, wait_ms) {
  if (byId("lamp").className === "live") say("The coordinator does not answer. This page may be out of date.");
  const until = performance.now() + wait_ms;
  while (performance.now() < until && current()) {
    const age = status ? `Out of date by ${span((performance.now() - heardAt) / 1000)}` : "The coordinator does not answer";
    show("stale", `${age}. Next attempt in ${span((until - performance.now()) / 1000)}`);
    await new Promise((done) => setTimeout(done, Math.min(1000, Math.max(0, until - performance.now()))));
  }
}

function welcome() {
  if (byId("lamp").className === "stale" && status) say("Connected again.");
  show("live", "Live");
  showProblem("");
  byId("sign-in").hidden = true;
  byId("main").hidden = false;
  byId("role").textContent = `Signed in as ${role}.`;
  byId("admin").hidden = role !== "admin";
  if (role === "admin") showInvite();
  askForSettings();
}

async function askForSettings() {
  try {
    ({ spec } = await (await asked("v1/run")).json());
    showSettings(spec);
    redraw();
  } catch {
    byId("settings-groups").textContent = "The settings could not be loaded.";
  }
}

// What the stream brought

function take(newer) {
  const before = status;
  status = newer;
  heardAt = performance.now();
  tick(now_s);
  redraw();
  byId("pause").textContent = status.paused ? "Resume" : "Pause";
  if (before) announce(before);
}

const now_s = () => (status ? status.now_s + (performance.now() - heardAt) / 1000 : 0);
function redraw() {
  if (!status) return;
  showStatus(status, curves, role === "admin", textUnit(spec));
  showHero(status, curves, textUnit(spec));
  showTrust(status);
}

// For screen readers: what matters at once, not every round
function announce(before) {
  const known = before.events.length ? before.events[before.events.length - 1].number : 0;
  const matters = status.events.filter((event) => event.number > known && ["late", "paused", "resumed", ...EXCLUDED].includes(event.kind));
  const ended = status.phases.filter((phase) => phase.finished && !before.phases.find((old) => old.phase === phase.phase)?.finished);
  const parts = [...matters.map((event) => `${event.kind}: ${eventText(event, status)}`), ...ended.map((phase) => `phase ${phase.phase + 1} is finished`)];
  if (parts.length) say(`${parts.join("; ")}.`);
}

function takeCurves(more) {
  for (const curve of more.training) {
    const known = curves.training.find((each) => each.phase === curve.phase);
    if (known) known.points = joined(known.points, curve.points, "round");
    else curves.training.push(curve);
  }
  curves.training.sort((one, other) => one.phase - other.phase);
  const before = curves.heldOut.length;
  curves.heldOut = joined(curves.heldOut, more.held_out, "at_s");
  if (before && curves.heldOut.length > before) say(`Held-out loss ${nats(curves.heldOut[curves.heldOut.length - 1].nats_per_byte)} nats per byte.`);
  showLoss(curves.heldOut);
  redraw();
  redrawCharts();
}

function joined(old, newer, key) {
  const have = new Set(old.map((point) => point[key]));
  return [...old, ...newer.filter((point) => !have.has(point[key]))].sort((one, other) => one[key] - other[key]);
}

const redrawCharts = () => drawCharts(curves, status, textUnit(spec));

// Administration

async function showInvite() {
  try {
    const { invite } = await (await asked("v1/invite")).json();
    byId("join").value = byId("invite").value = `blocktrain worker '${invite}'`;
    byId("copy-join").hidden = false;
    byId("join-hint").textContent = "Anybody who has this command can work on the run. Share it only with people you trust.";
    byId("invite-row").hidden = false;
  } catch {
    byId("invite-row").hidden = true; // this coordinator has none to show
  }
}

async function copy(from, button) {
  byId(from).select();
  try {
    await navigator.clipboard.writeText(byId(from).value);
  } catch {
    document.execCommand("copy"); // the clipboard API needs HTTPS or localhost
  }
  byId(button).textContent = "Copied";
  say("The command is copied.");
  setTimeout(() => { byId(button).textContent = "Copy"; }, 2000);
}

async function pauseOrResume() {
  byId("pause").disabled = true;
  try {
    await asked(status?.paused ? "v1/resume" : "v1/pause", { method: "POST" });
    showProblem("");
  } catch (error) {
    showProblem(error instanceof CoordinatorError ? error.message : "the coordinator does not answer: try again");
  }
  byId("pause").disabled = false;
}

// Wiring

function enter() {
  connection?.abort();
  [status, spec, curves, visit] = [null, null, { training: [], heldOut: [] }, visit + 1];
  show("", "Connecting…");
  listen(visit);
}

byId("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  keep(byId("token").value);
  enter();
});
byId("pause").addEventListener("click", pauseOrResume);
byId("copy").addEventListener("click", () => copy("invite", "copy"));
byId("copy-join").addEventListener("click", () => copy("join", "copy-join"));
byId("chart-options").addEventListener("change", redrawCharts);
byId("held-out-csv").addEventListener("click", () => download("held-out-loss.csv", heldOutCsv(curves.heldOut)));
byId("training-csv").addEventListener("click", () => download("training-loss.csv", trainingCsv(curves.training)));
byId("workers-csv").addEventListener("click", () => download("workers.csv", workersCsv(status?.workers ?? [])));
byId("leave").addEventListener("click", () => {
  askForToken();
  connection?.abort();
});
addEventListener("hashchange", () => {
  takeTokenFromAddress();
  enter();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
setInterval(() => tick(now_s), 1000);
takeTokenFromAddress();
if (token()) enter();
else askForToken();
