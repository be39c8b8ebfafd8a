// The public leaderboard. It asks for no access token and shows what it gets as text, never as HTML.
import { table } from "./view.js";
import { bytes, count, nats, percent } from "./words.js";

const byId = (id) => document.getElementById(id);
const AGAIN_MS = 60_000;

const amount = (tokens, unit) => (unit === "bytes" ? bytes(tokens) : `${count(tokens)} tokens`);

function show(board) {
  document.title = `Leaderboard of ${board.run} · BlockTrain`;
  byId("run").textContent = board.run;
  byId("num-workers").textContent = count(board.num_workers);
  byId("text").textContent = amount(board.tokens, board.unit);
  byId("done").textContent = percent(board.progress);
  byId("loss").textContent = board.nats_per_byte === null ? "–" : nats(board.nats_per_byte);
  const caption = board.entries.length === board.num_workers ? "All workers that contributed" : `The first ${count(board.entries.length)} of ${count(board.num_workers)} workers`;
  table(byId("entries"), caption, ["Worker", "Rank", "Text", "Share", "Updates", "Now"], board.entries.map((entry) => [
    entry.alias, count(entry.rank), amount(entry.tokens, board.unit), percent(entry.tokens / (board.tokens || 1)), count(entry.updates),
    entry.active ? "active" : "away",
  ]));
}

async function refresh() {
  try {
    const response = await fetch("v1/leaderboard");
    if (!response.ok) throw new Error(`The coordinator answered with status ${response.status}.`);
    show(await response.json());
    byId("problem").hidden = true;
  } catch (error) {
    byId("problem").textContent = `${error.message} What you see may be old.`;
    byId("problem").hidden = false;
  }
  setTimeout(refresh, AGAIN_MS);
}

refresh();
