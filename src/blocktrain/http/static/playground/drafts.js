// What one event of a stream added, coloured by who decided it. A speculative traversal writes the accepted part of a draft
// and then one byte or token of the whole model: a correction if the rest of the draft was refused, otherwise an addition.
// A sweep begins with such a traversal; what it adds later is approximate and has no colour.

function span(text, kind) {
  const made = document.createElement("span");
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

export function coloured(text, effort, before) {
  const since = (name) => effort[name] - (before?.[name] ?? 0);
  if (effort.mode === "autoregressive" || !since("exact")) return span(text, "");
  const characters = [...text];
  const end = since("traversals") > 0 ? characters.pop() : "";
  const whole = document.createElement("span");
  whole.append(span(characters.join(""), "drafted"), span(end, since("drafted") > since("accepted") ? "corrected" : "decided"));
  return whole;
}
