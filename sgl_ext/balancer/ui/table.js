// A table that changes in place: its rows keep their elements, so the focus and the scroll stay.
// Texts of clients are only ever set as text.

/** An element with attributes and children; a child that is no element is text. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * A table in `place`.
 *
 * columns: of each its `head`, `show(cell, item)` or `text(item)`, and `kind`: a class of its cells,
 *   "number" to align them to the right, "extra" for what a narrow window leaves out.
 * key: the identity of an item.
 */
export class Table {
  constructor(place, { label, columns, key, empty }) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.empty = element("p", { class: "empty" }, empty);
    this.more = element("p", { class: "note more" });
    this.body = element("tbody");
    const heads = columns.map(({ head, kind = "", hidden }) =>
      element("th", { scope: "col", class: kind }, hidden ? element("span", { class: "unseen" }, head) : head));
    this.scroll = element("div", { class: "scroll", role: "region", "aria-labelledby": label },
      element("table", { "aria-labelledby": label }, element("thead", {}, element("tr", {}, ...heads)), this.body));
    place.replaceChildren(this.scroll, this.empty, this.more);
    this.show([], 0);
  }

  /** Shows items in their order. total: how many there are, of which these are a part. */
  show(items, total, empty) {
    this.scroll.hidden = !items.length;
    this.empty.hidden = Boolean(items.length);
    if (empty) setText(this.empty, empty);
    const left = total - items.length;
    this.more.hidden = left <= 0 || !items.length;
    if (left > 0) setText(this.more, `${left.toLocaleString("en")} more are not shown.`);
    const focused = document.activeElement;
    const keys = new Set(items.map(this.key));
    for (const [key, row] of this.rows) {
      if (keys.has(key)) continue;
      this.rows.delete(key);
      if (row.contains(document.activeElement)) this.passFocus(row);
      row.remove();
    }
    let before = null;
    for (const item of items) {
      const key = this.key(item);
      let row = this.rows.get(key);
      if (!row) {
        row = element("tr");
        for (const { kind = "", isHead } of this.columns) {
          row.append(element(isHead ? "th" : "td", isHead ? { class: kind, scope: "row" } : { class: kind }));
        }
        this.rows.set(key, row);
      }
      this.columns.forEach(({ text, show }, at) => {
        const cell = row.cells[at];
        if (show) show(cell, item);
        else setText(cell, text(item));
      });
      const next = before ? before.nextSibling : this.body.firstChild;
      if (next !== row) this.body.insertBefore(row, next);
      before = row;
    }
    // A row that moves loses it.
    if (this.body.contains(focused)) focused.focus({ preventScroll: true });
    // Only what scrolls takes a place in the order of the keyboard.
    const { scrollHeight, clientHeight, scrollWidth, clientWidth } = this.scroll;
    if (scrollHeight > clientHeight || scrollWidth > clientWidth) this.scroll.tabIndex = 0;
    else this.scroll.removeAttribute("tabindex");
  }

  /** The row with the focus goes: its neighbour's button gets it, or the heading. */
  passFocus(row) {
    const near = row.nextElementSibling ?? row.previousElementSibling;
    const heir = near?.querySelector("button") ?? document.getElementById(this.scroll.getAttribute("aria-labelledby"));
    heir?.focus();
  }
}
