// Added to Sphinx's search, in which all words must be on a page and pages come in alphabetical order.

// Splits a query as docs/conf.py splits the pages: Chinese into pairs of characters.
function splitQuery(query) {
  const words = query.match(/[\u4e00-\u9fff]+|(?:(?![\u4e00-\u9fff])[\p{L}\p{N}_])+/gu) ?? [];
  return words.flatMap((word) =>
    /[\u4e00-\u9fff]{3}/.test(word) ? [...word].slice(1).map((character, at) => word[at] + character) : [word],
  );
}

// The Chinese site has no copies of pages that are English.
if (document.documentElement.lang.startsWith("zh"))
  document.addEventListener("DOMContentLoaded", () => {
    const query = new URLSearchParams(window.location.search).get("q");
    if (!query) return;
    const link = Object.assign(document.createElement("a"), { id: "english", textContent: "在英文页面中搜索" });
    link.href = `../en/search.html?q=${encodeURIComponent(query)}`;
    const line = document.createElement("p");
    line.append("作业文件、ds_config.json 的键、lint 规则、命令行等查阅用的页面只有英文：", link);
    document.getElementById("search-results").after(line);
  });

// Returns the pages with the most and the rarest of the words, above all in headings; long pages have every word.
Search.performTermsSearch = (words, excluded) => {
  const { terms, titleterms, docnames, titles, filenames } = Search._index;
  const pages = (index, word) => (Object.hasOwn(index, word) ? [index[word]].flat() : []);
  const lengths = docnames.map(() => 0);
  for (const files of Object.values(terms)) for (const file of [files].flat()) lengths[file] += 1;
  const mean = lengths.reduce((sum, length) => sum + length) / lengths.length;
  const scores = new Map();
  for (const word of words) {
    const isKnown = word.length < 4 || [terms, titleterms].some((index) => Object.hasOwn(index, word));
    const all = Object.keys({ ...terms, ...titleterms });
    const known = isKnown ? [word] : all.filter((term) => term.includes(word));
    const text = new Set(known.flatMap((term) => pages(terms, term)));
    const headings = new Set(known.flatMap((term) => pages(titleterms, term)));
    const weight = Math.log(1 + docnames.length / text.union(headings).size);
    for (const file of text.union(headings)) {
      const found = (text.has(file) ? 1 : 0) + (headings.has(file) ? 2 : 0);
      scores.set(file, (scores.get(file) ?? 0) + (weight * found) / Math.sqrt(mean + lengths[file]));
    }
  }
  for (const word of excluded) pages(terms, word).forEach((file) => scores.delete(file));
  // what leads to other pages, or is for developers
  const isAside = /(^|\/)index$|^architecture$|^style$|^extending\//;
  for (const [file, score] of scores) if (isAside.test(docnames[file])) scores.set(file, score / 2);
  const best = Math.max(...scores.values());
  return [...scores]
    .filter(([, score]) => score > best / 3)
    .map(([file, score]) => [docnames[file], titles[file], "", null, (12 * score) / best, filenames[file], "text"]);
};
