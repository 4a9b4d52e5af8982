// Draws the page about a run, with the functions of step.js.

function number(x) {
  if (x === 0) return "0";
  const size = Math.abs(x);
  return size >= 1e6 || size < 1e-3 ? x.toExponential(2) : String(Number(x.toPrecision(size >= 1000 ? 6 : 4)));
}

const when = (time) => new Date(1000 * time).toISOString().replace("T", " ").slice(0, 19) + " UTC";

function table(head, rows, right) {
  const cell = (tag, html, i) => `<${tag}${right.includes(i) ? ' class="n"' : ""}>${html}</${tag}>`;
  const line = (tag, row) => `<tr>${row.map((html, i) => cell(tag, html, i)).join("")}</tr>`;
  return `<div class="box scroll"><table>` +
    (head.length ? `<thead>${line("th", head)}</thead>` : "") + `<tbody>${rows.map((row) => line("td", row)).join("")}</tbody></table></div>`;
}

// A chart of lines over steps: lines are {label, colour, points: [[step, value], ...]}; bad are rows [step, "nan"].
function chart(id, title, lines, text, {bad = [], about = ""} = {}) {
  const box = byId(id);
  const width = Math.max(box.clientWidth - 26, 320), height = 170, left = 58, top = 8, bottom = 22;
  const points = lines.flatMap((line) => line.points);
  const steps = [...points, ...bad].map((p) => p[0]), values = points.length ? points.map((p) => p[1]) : [0];
  const least = (xs) => xs.reduce((a, b) => Math.min(a, b)), most = (xs) => xs.reduce((a, b) => Math.max(a, b));
  const first = least(steps), last = Math.max(most(steps), first + 1);
  let low = least(values), high = most(values);
  if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; }
  low = Math.max(low, -Number.MAX_VALUE);
  high = Math.min(high, Number.MAX_VALUE);
  const x = (step) => left + (step - first) / (last - first) * (width - left - 8);
  const unit = Math.max(Math.abs(low), Math.abs(high));  // the difference of two large values may be infinite
  const y = (value) => top + (high / unit - value / unit) / (high / unit - low / unit) * (height - top - bottom);
  let svg = "";
  for (const at of ticks(low, high, 4)) {
    svg += `<line class="axis" x1="${left}" x2="${width - 8}" y1="${y(at)}" y2="${y(at)}"/>` +
      `<text x="${left - 6}" y="${y(at) + 4}" text-anchor="end">${esc(text(at))}</text>`;
  }
  for (const at of ticks(first, last, 6)) {
    if (Number.isInteger(at)) svg += `<text x="${x(at)}" y="${height - 6}" text-anchor="middle">${at}</text>`;
  }
  const marks = [...data.marks, ...bad.map(([step, value]) => [step, `${title} is ${value} in step ${step}`, true])];
  for (const [step, label, isBad] of marks.filter(([step]) => step >= first && step <= last)) {
    svg += `<line class="mark ${isBad ? "bad" : ""}" x1="${x(step)}" x2="${x(step)}" y1="${top}" y2="${height - bottom}">` +
      `<title>${esc(label)}</title></line>`;
  }
  lines = lines.filter((line) => line.points.length);
  for (const line of lines) {
    const path = line.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    svg += line.points.length > 1
      ? `<path class="curve" d="${path}" fill="none" stroke="${line.colour}" stroke-width="1.5"/>`
      : `<circle class="curve" cx="${x(line.points[0][0])}" cy="${y(line.points[0][1])}" r="3" fill="${line.colour}"/>`;
  }
  const now = about ? esc(about) : lines.map((line) => `<i style="color:${line.colour}">${esc(line.label)}</i>`).join(" ");
  box.innerHTML = `<h3>${esc(title)}<span>${now}</span></h3>` +
    `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${esc(title)} over steps">${svg}</svg>`;
  box.addEventListener("mousemove", (event) => {
    const frame = box.getBoundingClientRect();
    const step = first + ((event.clientX - frame.left - 13) * width / (frame.width - 26) - left) / (width - left - 8) * (last - first);
    const nearest = (line) => line.points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
    const rows = lines.map((line) => [line.label, nearest(line)]);
    showTip(event, rows.length ? [`step ${rows[0][1][0]}`, ...rows.map(([label, p]) => `${label}: ${text(p[1])}`)].join("\n") : "");
  });
  box.addEventListener("mouseleave", (event) => showTip(event, ""));
}

function drawSummary() {
  const start = data.starts[data.starts.length - 1];
  const parts = [];
  if (data.last) parts.push(`${Math.max(data.last[0] + 1, 0)}${start && start[2].total ? ` of ${start[2].total}` : ""} steps, the last at ${when(data.last[1])}`);
  for (const [name, curve] of Object.entries(data.series)) {
    if (curve.num_bad) parts.push(`${curve.num_bad} value${curve.num_bad > 1 ? "s" : ""} of ${name} ${curve.num_bad > 1 ? "are" : "is"} not finite`);
  }
  if (start && start[2].mesh && start[2].device) parts.push(`${start[2].mesh} on ${start[2].device}`);
  if (data.starts.length > 1) parts.push(`started ${data.starts.length} times`);
  if (data.saved.length) parts.push(`newest checkpoint after ${data.saved[data.saved.length - 1]} steps`);
  if (data.num_unreadable) parts.push(`${data.num_unreadable} line${data.num_unreadable > 1 ? "s" : ""} of the log could not be read`);
  byId("summary").textContent = parts.join(" · ");
}

function drawValues() {
  const names = Object.keys(data.series);
  byId("values").innerHTML = "<h2>Values over steps</h2>" + (names.length
    ? `<div class="charts">${names.map((name, i) => `<div class="box" id="value-${i}"></div>`).join("")}</div>`
    : "<p>The run has logged no numbers: call run.log({\"loss\": metrics.loss}) in a step.</p>");
  names.forEach((name, i) => {
    const text = name.endsWith("nbytes") ? bytes : name.endsWith("_s") && !name.endsWith("per_s") ? seconds : number;
    const {points, every, bad, num_bad, last} = data.series[name];
    const about = [`last: ${typeof last === "number" ? text(last) : last}`];
    if (num_bad) about.push(`${num_bad} not finite`);
    if (every > 1) about.push(`of each ${every} values the least and the greatest`);
    chart(`value-${i}`, name, [{label: name, colour: "var(--accent)", points}], text, {bad, about: about.join(" · ")});
  });
}

function drawCompared() {
  if (!data.compared.length) return;
  const rows = data.compared.map(([what, a, b]) => [esc(what), seconds(a), seconds(b), a ? (b / a).toFixed(2) : ""]);
  byId("compared").innerHTML = "<h2>Predicted and measured</h2><p>Seconds of a step by kind of op; an op is one entry of the schedule, such as the gather of a unit. A ratio above 1 is slower than predicted.</p>" +
    table(["kind of op", "predicted", "measured", "ratio"], rows, [1, 2, 3]);
}

function drawLayout() {
  const layout = data.layout;
  if (!layout) return;
  const strip = (cells) => {
    const size = Math.max(3, Math.min(12, Math.floor(260 / cells.length)));
    const rects = [...cells].map((cell, i) => `<rect x="${i * size}" width="${size - 1}" height="12" fill="var(${cell === "1" ? "--accent" : "--line"})"/>`);
    return `<svg style="width:${size * cells.length}px" height="12" role="img" aria-label="${esc(cells)}">${rects.join("")}</svg>`;
  };
  let before = null;
  const rows = layout.rows.map(([unit, leaf, what, spec, share, cells]) => {
    const title = unit === before ? "" : `<b>${esc(unit)}</b>`;
    before = unit;
    return [title, `<code>${esc(leaf)}</code>`, `<code>${esc(what)}</code>`, esc(spec), esc(share), strip(cells)];
  });
  const kept = Object.entries(layout.nbytes).map(([kind, nbytes]) => `${kind} ${bytes(nbytes)}`).join(", ");
  byId("layout").innerHTML = `<h2>Who holds what</h2><p>${esc(layout.num_params.toLocaleString("en"))} parameters on ${esc(layout.layout)}. At rest a rank holds: ` +
    `${esc(kept)} (optim is one value of optimizer state for each parameter). A cell is a rank, or a run of ranks: blue with some of the leaf. The spec is how the user places the leaf, ` +
    `such as along which axis a dimension is split; it is empty for leaves that the strategy alone places.</p>` +
    table(["unit", "leaf", "dtype and shape", "spec", "on a rank", `ranks 0 to ${layout.ranks - 1}`], rows, []);
}

function drawRanks() {
  if (!data.own_s.length) return;
  const ranks = data.own_s.reduce((most, [, row]) => Math.max(most, row.length), 0), sorted = (row) => [...row].sort((a, b) => a - b);
  const named = ranks <= 16
    ? [...Array(ranks).keys()].map((rank) => [`rank ${rank}`, (row) => row[rank]])
    : [["fastest", (row) => sorted(row)[0]], ["median", (row) => sorted(row)[row.length >> 1]], ["slowest", (row) => sorted(row)[row.length - 1]]];
  byId("ranks").innerHTML = "<h2>Ranks</h2><p>Seconds that a step takes each rank without waits for other ranks. A rank above the others is a straggler.</p>" +
    '<div class="box" id="own"></div>';
  const lines = named.map(([label, of], i) => ({
    label, colour: `hsl(${Math.round(i * 137.5) % 360} 60% 50%)`, points: data.own_s.map(([step, row]) => [step, of(row)]).filter((p) => p[1] !== undefined),
  }));
  chart("own", "own time", lines, seconds);
}

function drawEvents() {
  const starts = data.starts.map(([step, time], i) => [step, time, i ? `started again, to go on at step ${step}` : "started"]);
  const rows = [...starts, ...data.events].sort((a, b) => a[1] - b[1]);
  const notes = [];
  if (data.num_events > data.events.length) notes.push(`The newest ${data.events.length} of ${data.num_events} events are listed.`);
  if (data.num_marks > data.marks.length) notes.push(`Charts mark ${data.marks.length} of ${data.num_marks} starts and events.`);
  byId("events").innerHTML = `<h2>Starts, slow ranks and faults</h2><p>${notes.join(" ")}</p>` + (rows.length
    ? table(["step", "time", "event"], rows.map(([step, time, text]) => [step, when(time), esc(text)]), [0])
    : "<p>Nothing is recorded.</p>");
}

function drawEnvironment() {
  if (!data.starts.length) return;
  const rows = [];
  const add = (name, value) => {
    if (value !== null && typeof value === "object") {
      for (const [key, each] of Object.entries(value)) add(name ? `${name}.${key}` : key, each);
    } else rows.push([esc(name), `<code>${esc(value)}</code>`]);
  };
  add("", data.starts[data.starts.length - 1][2]);
  byId("environment").innerHTML = "<h2>Settings and environment</h2><p>Of the last start.</p>" + table([], rows, []);
}

drawSections({
  summary: drawSummary, values: drawValues, step: drawStep, compared: drawCompared, layout: drawLayout, ranks: drawRanks,
  events: drawEvents, environment: drawEnvironment,
});
