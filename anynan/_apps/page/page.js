"use strict";
for (const figure of document.querySelectorAll("figure[data-grid]")) {
  const grid = JSON.parse(figure.querySelector("script").textContent);
  const picture = figure.querySelector("svg"), read = figure.querySelector(".read");
  const cursor = picture.querySelector(".cursor");
  let row = 0, column = grid.columns.length - 1, cells = null;
  const held = Uint8Array.from(atob(grid.cells), (c) => c.charCodeAt(0));
  new Response(new Blob([held]).stream().pipeThrough(new DecompressionStream("deflate")))
    .arrayBuffer().then((bytes) => { cells = new DataView(bytes); figure.dataset.ready = ""; });
  const said = (code, limit) => {
    if (code in grid.kinds) return grid.kinds[code];
    const bits = (grid.top - code) / grid.steps;
    const size = limit === null ? "" : `, magnitude ${(limit * 2 ** -bits).toPrecision(2)}`;
    return `${bits.toFixed(1)} bits of headroom${size}`;
  };
  const show = () => {
    if (cells === null) return;
    row = Math.max(0, Math.min(grid.layers.length - 1, row));
    column = Math.max(0, Math.min(grid.columns.length - 1, column));
    const [first, last] = grid.columns[column];
    const code = cells.getUint16(2 * (row * grid.columns.length + column), true);
    const when = first === last ? `step ${first}` : `steps ${first} to ${last}`;
    read.textContent = `${grid.layers[row]}, ${when}: ${said(code, grid.limits[row])}`;
    cursor.setAttribute("x", grid.left + column * grid.width);
    cursor.setAttribute("y", grid.over + row * grid.height);
    cursor.removeAttribute("visibility");
  };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    column = Math.floor((event.clientX - box.left - grid.left) / grid.width);
    row = Math.floor((event.clientY - box.top - grid.over) / grid.height);
    show();
  });
  picture.addEventListener("keydown", (event) => {
    const way = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!way) return;
    event.preventDefault();
    row += way[0];
    column += way[1];
    show();
  });
  picture.addEventListener("focus", show);
}
