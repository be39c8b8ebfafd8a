// A streamed completion as its events, and the end of a text in bytes.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    kept += value;
    const parts = kept.split("\n\n");
    kept = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

// The last whole characters that fit into `most` bytes
export function textEnd(text, most) {
  const bytes = new TextEncoder().encode(text);
  const begin = Math.max(0, bytes.length - most);
  return new TextDecoder().decode(bytes.slice(begin)).replace(begin ? /^\uFFFD+/ : /^$/, "");
}
