// Where the edges of the tree lie: pure. Rows are depths; a width is a share of all that is below.

/**
 * Makes one tree of the edges in memory and of those that are on disk only.
 * Returns the root `{id: null, children, ...}`; each edge has `weight` (its own), `total` (with all below) and `tier`.
 */
export function treeOf(cache, measure) {
  const root = { id: null, key: "root", children: [], parent: null, tier: "root", weight: 0, tokens: 0, start: 0, stop: 0 };
  const inMemory = new Map();
  for (const node of cache.nodes) {
    const parent = node.parent === null ? root : inMemory.get(node.parent);
    if (!parent) continue;
    const edge = { ...node, key: `m${node.id}`, children: [], parent, weight: measure(node, node.tokens) };
    parent.children.push(edge);
    inMemory.set(node.id, edge);
  }
  const onDisk = new Map();
  for (const node of cache.disk_nodes) {
    const above = node.parent === null ? root : onDisk.get(node.parent);
    const joint = node.memory_id === null || node.memory_id === undefined ? root : inMemory.get(node.memory_id);
    const shared = node.memory_tokens ?? 0;
    if (shared >= node.tokens) {
      onDisk.set(node.id, joint ?? root);
      continue;
    }
    const parent = shared > 0 || !above ? (joint ?? root) : above;
    const rest = node.tokens - shared;
    const edge = { ...node, key: `d${node.id}`, tier: "disk", tokens: rest, start: node.start + shared, children: [], parent, weight: measure(node, rest) };
    parent.children.push(edge);
    onDisk.set(node.id, edge);
  }
  addUp(root);
  return root;
}

/** Returns all edges below and with `root`, parents first. */
export function below(root) {
  const order = [root];
  for (const edge of order) order.push(...edge.children);
  return order;
}

/**
 * Makes a tree as people see it: an edge of fewer than `few` tokens joins its parent, and one that goes on unbranched
 * for the same conversations, in the same tier, is one edge with what follows. `parts` are the edges that it was.
 */
export function joined(root, few) {
  for (const edge of below(root).reverse()) {
    edge.parts = [edge];
    if (!few) continue;
    for (const child of edge.children.filter((one) => one.tokens < few)) {
      edge.weight += child.weight;
      edge.parts.push(...child.parts);
      edge.children.splice(edge.children.indexOf(child), 1, ...child.children);
      for (const one of child.children) one.parent = edge;
    }
    const [only] = edge.children;
    if (edge.id !== null && edge.children.length === 1 && goesOn(edge, only)) join(edge, only);
  }
  addUp(root);
  return root;
}

/** Makes every way through the tree equally wide. */
export function evenly(root) {
  for (const edge of below(root)) edge.weight = edge.children.length ? 0 : 1;
  addUp(root);
}

function goesOn(edge, next) {
  const [ours, theirs] = [edge.name, next.name].map((name) => name && `${name.num_sessions} ${name.sessions.join("\n")}`);
  return edge.tier === next.tier && ours === theirs && !edge.pinned === !next.pinned;
}

function join(edge, next) {
  const { stop, restore_point, uses, children } = next;
  const name = edge.name && { ...edge.name, last: next.name.last, tools: Math.max(edge.name.tools, next.name.tools), text: (next.name.last > edge.name.last && next.name.text) || edge.name.text };
  Object.assign(edge, {
    stop, restore_point, uses, children, name, parts: [...edge.parts, ...next.parts], tokens: edge.tokens + next.tokens,
    weight: edge.weight + next.weight, bytes: edge.bytes + next.bytes, disk_tokens: (edge.disk_tokens ?? 0) + (next.disk_tokens ?? 0),
  });
  for (const one of children) one.parent = edge;
}

function addUp(root) {
  const order = below(root);
  for (const edge of order.reverse()) {
    edge.total = edge.weight + edge.children.reduce((all, one) => all + one.total, 0);
    edge.count = 1 + edge.children.reduce((all, one) => all + one.count, 0);
    edge.height = 1 + edge.children.reduce((most, one) => Math.max(most, one.height), 0);
    edge.children.sort((a, b) => b.total - a.total);
  }
}

/**
 * Returns the boxes `{edge, x, width, row, count}` to draw below `top` within `width` pixels.
 * What is narrower than a pixel is drawn together with its neighbours, as one box without an edge.
 */
export function boxesOf(top, width, maxRows) {
  const boxes = [];
  const waiting = [{ edge: top, x: 0, width, row: 0 }];
  while (waiting.length) {
    const box = waiting.pop();
    boxes.push({ ...box, count: 1 });
    if (box.row + 1 >= maxRows) continue;
    const each = box.width / (box.edge.total || 1);
    let { x } = box;
    let small = null;
    for (const child of box.edge.children) {
      const own = child.total * each;
      if (own >= 1) waiting.push({ edge: child, x, width: own, row: box.row + 1 });
      else if (small) {
        small.width += own;
        small.count += child.count;
        small.height = Math.max(small.height, child.height);
      } else small = { edge: null, x, width: own, row: box.row + 1, count: child.count, height: child.height, tier: child.tier };
      x += own;
    }
    if (small) boxes.push(small);
  }
  return boxes;
}

/** Returns the box at a place, or undefined. */
export function boxAt(boxes, x, row) {
  return boxes.find((box) => box.row === row && x >= box.x && x < box.x + Math.max(1, box.width));
}
