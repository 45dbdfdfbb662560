// Markdown to a tree of plain objects: pure, in linear time, whatever the text. HTML in it stays text.

const MAX_DEPTH = 8;
const MAX_MATH_LINES = 60;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`\s]{0,40})/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const ITEM = /^( *)(?:([-*+])|(\d{1,9})[.)])(?: +|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DELIMITER = /^:?-+:?$/;
const TASK = /^\[([ xX])\] +/;
const NOTE = /^ {0,3}\[\^([^\]\s]{1,40})\]: ?(.*)$/;
const MATH_BLOCKS = [["$$", "$$"], ["\\[", "\\]"]];

/** Returns blocks: `{type, …}` with `children` (blocks), `inline` (spans) or `text`. */
export function parse(text) {
  return blocksOf(text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocksOf(lines, depth) {
  const blocks = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) blocks.push({ type: "paragraph", inline: spansOf(paragraph.join("\n").trim()) });
    paragraph = [];
  };
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (fence) {
      flush();
      const end = closing(lines, at + 1, fence[1]);
      blocks.push({ type: "code", language: fence[2], text: lines.slice(at + 1, end).join("\n") });
      at = end + 1;
    } else if (heading) {
      flush();
      blocks.push({ type: "heading", level: heading[1].length, inline: spansOf(headingText(heading[2] ?? "")) });
      at += 1;
    } else if (mathAt(lines, at)) {
      flush();
      const { text, next } = mathAt(lines, at);
      blocks.push({ type: "math", text });
      at = next;
    } else if (NOTE.test(line)) {
      flush();
      const [, id, said] = NOTE.exec(line);
      blocks.push({ type: "note", id, inline: spansOf(said) });
      at += 1;
    } else if (RULE.test(line)) {
      flush();
      blocks.push({ type: "rule" });
      at += 1;
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      flush();
      const inner = [];
      while (at < lines.length && QUOTE.test(lines[at])) inner.push(QUOTE.exec(lines[at++])[1]);
      blocks.push({ type: "quote", children: blocksOf(inner, depth + 1) });
    } else if (ITEM.test(line) && depth < MAX_DEPTH && (!paragraph.length || ITEM.exec(line)[4])) {
      flush();
      at = listAt(lines, at, depth, blocks);
    } else if (line.includes("|") && at + 1 < lines.length && isDelimiter(lines[at + 1])) {
      flush();
      at = tableAt(lines, at, blocks);
    } else {
      if (line.trim()) paragraph.push(line);
      else flush();
      at += 1;
    }
  }
  flush();
  return blocks;
}

/** Returns a formula that stands by itself, and the line after it; null where none begins, or none ends soon. */
function mathAt(lines, at) {
  const first = lines[at].trim();
  const [open, close] = MATH_BLOCKS.find(([mark]) => first.startsWith(mark)) ?? [];
  if (!open) return null;
  for (let end = at; end < Math.min(lines.length, at + MAX_MATH_LINES); end += 1) {
    const line = lines[end].trim();
    if (!line.endsWith(close) || (end === at && line.length < open.length + close.length)) continue;
    const text = lines.slice(at, end + 1).join("\n").trim().slice(open.length, -close.length);
    return text.includes(close) ? null : { text, next: end + 1 };
  }
  return null;
}

/** Returns a heading's text without the marks that may close it; by hand, since a regex would try each blank. */
function headingText(text) {
  const trimmed = text.trim();
  let end = trimmed.length;
  while (trimmed[end - 1] === "#") end -= 1;
  return end === 0 || trimmed[end - 1] === " " ? trimmed.slice(0, end).trim() : trimmed;
}

/** Returns the line that closes a fence; the end of the text where none does. */
function closing(lines, from, mark) {
  for (let at = from; at < lines.length; at += 1) {
    const line = lines[at].trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) return at;
  }
  return lines.length;
}

function listAt(lines, from, depth, blocks) {
  const [, indent, , number] = ITEM.exec(lines[from]);
  const list = { type: "list", ordered: number !== undefined, start: number ? Number(number) : 1, items: [] };
  let at = from;
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length !== indent.length || (found[3] !== undefined) !== list.ordered || RULE.test(lines[at])) break;
    const inner = [found[4]];
    const inside = indent.length + 2;
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const own = line.length - line.trimStart().length;
      if (!line.trim()) {
        const next = lines[at + 1] ?? "";
        if (!next.trim() || next.length - next.trimStart().length < inside) break;
      } else if (own < inside && (ITEM.test(line) || FENCE.test(line) || HEADING.test(line) || lines[at - 1].trim() === "")) break;
      inner.push(line.slice(Math.min(own, inside)));
      at += 1;
    }
    const task = TASK.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(task[0].length);
    list.items.push({ children: blocksOf(inner, depth + 1), isDone: task ? task[1] !== " " : null });
    let next = at;
    while (next < lines.length && !lines[next].trim()) next += 1;
    const following = ITEM.exec(lines[next] ?? "");
    if (following && following[1].length === indent.length) at = next;
  }
  blocks.push(list);
  return at;
}

function isDelimiter(line) {
  return barred(line).every((cell) => DELIMITER.test(cell.trim()));
}

/** Returns what stands between the bars of a line. */
function barred(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|");
}

function tableAt(lines, from, blocks) {
  const cells = (line) => barred(line).slice(0, 64).map((cell) => spansOf(cell.trim()));
  const table = { type: "table", head: cells(lines[from]), rows: [] };
  let at = from + 2;
  while (at < lines.length && lines[at].includes("|")) table.rows.push(cells(lines[at++]));
  blocks.push(table);
  return at;
}

const SPAN = /(`+)|(\\\(|\$\$)|(<br ?\/?>)|\[\^([^\]\s]{1,40})\]|(\*\*|__|~~|\*|_)|(!?\[)|(https?:\/\/[^\s<>"'`)\]]{1,2000})|\\([\\`*_{}[\]()#+\-.!|~>])|((?<! ) {2,}\n)/g;
const LINK = /\[([^[\]\n]{0,500})\]\(\s{0,3}<?([^\s<>)]{1,2000})>?(?:\s{1,3}"[^"\n]{0,300}")?\s{0,3}\)/y;
const KINDS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

/** Returns spans: texts, and `{type, …}` with `children`, `text` or `href`. */
function spansOf(text, depth = 0) {
  const spans = [];
  const missing = new Set();
  const find = new RegExp(SPAN);
  let done = 0;
  const add = (upTo, span, next) => {
    if (upTo > done) spans.push(text.slice(done, upTo));
    if (span !== null) spans.push(span);
    done = next;
    find.lastIndex = next;
  };
  for (let found = find.exec(text); found; found = find.exec(text)) {
    const at = found.index;
    const [whole, ticks, math, brokenTag, note, mark, bracket, address, escaped, broken] = found;
    if (ticks) {
      const end = missing.has(ticks) ? -1 : text.indexOf(ticks, at + ticks.length);
      if (end < 0) missing.add(ticks);
      else add(at, { type: "code", text: text.slice(at + ticks.length, end).replace(/^ (.*) $/s, "$1") }, end + ticks.length);
    } else if (math) {
      const close = math === "$$" ? "$$" : "\\)";
      const end = missing.has(math) ? -1 : text.indexOf(close, at + 2);
      if (end < 0) missing.add(math);
      else add(at, { type: "math", text: text.slice(at + 2, end) }, end + 2);
    } else if (note) add(at, { type: "ref", id: note }, at + whole.length);
    else if (mark) {
      const end = closes(text, at, mark, missing);
      if (end > 0 && depth < MAX_DEPTH) {
        add(at, { type: KINDS[mark], children: spansOf(text.slice(at + mark.length, end), depth + 1) }, end + mark.length);
      }
    } else if (bracket) {
      LINK.lastIndex = at + bracket.length - 1;
      const link = LINK.exec(text);
      if (link) add(at, linkOf(link[1], link[2]), LINK.lastIndex);
    } else if (address) {
      const href = address.replace(/[.,;:!?]+$/, "");
      add(at, linkOf(href, href), at + href.length);
    } else if (escaped) add(at, escaped, at + whole.length);
    else if (broken || brokenTag) add(at, { type: "break" }, at + whole.length);
  }
  if (done < text.length) spans.push(text.slice(done));
  return spans;
}

/** Returns where an emphasis that begins at `at` closes; -1 if it is none. */
function closes(text, at, mark, missing) {
  const first = text[at + mark.length];
  if (first === undefined || /\s/.test(first) || missing.has(mark)) return -1;
  if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) return -1;
  for (let end = text.indexOf(mark, at + mark.length + 1), tries = 0; end >= 0; end = text.indexOf(mark, end + 1)) {
    const isDouble = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const isWord = mark[0] === "_" && /\w/.test(text[end + mark.length] ?? "");
    if (!/\s/.test(text[end - 1]) && !isDouble && !isWord) return end;
    if ((tries += 1) > 50) return -1;
  }
  missing.add(mark);
  return -1;
}

/** Links lead to http and https only, and show where; anything else stays text. */
function linkOf(label, address) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return `[${label}](${address})`;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return `[${label}](${address})`;
  return { type: "link", href: url.href, text: label || address };
}
