"""WebShop over the files that its authors publish: search, click through the shop, buy."""

import re
from typing import Any

import gymnasium

from mpo_jax.environments.documents import Document, DocumentIndex
from mpo_jax.environments.text import AnyText
from mpo_jax.environments.webshop_data import Product, read_goals, read_products, reward

PAGE, HITS = 10, 50  # products of a page, and of a search
BACK, NEXT, PREVIOUS, BUY = "back to search", "next >", "< prev", "buy now"
TOLD = ("description", "features")  # what a product's page has behind buttons


class WebShop(gymnasium.Env):
    """The shop of *WebShop* (arXiv:2207.01206): actions `search[words]` and `click[what a page offers]`.

    The search is BM25 over all that is said of a product. Reviews are left out. The reward of what is bought is
    `webshop_data.reward`, 0 until then, and the task is solved where it is 1.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  gymnasium's own convention

    def __init__(
        self,
        items: str,
        attributes: str,
        instructions: str,
        *,
        num_products: int | None = None,
        first: int = 0,
        turn_limit: int = 15,
    ):
        """Reads the files and indexes the products.

        Args:
          items: `items_shuffle.json`, or that of a thousand products.
          attributes: `items_ins_v2.json`, or its own.
          instructions: `items_human_ins.json`.
          num_products: use so many of the products; all 1.18 million take gigabytes in every process.
          first: which goal task 0 asks; the authors test on the first 500, and train from 1,500 on.
          turn_limit: turns after which an episode is truncated.

        Raises:
          ValueError: a file cannot be read or lacks what it must have.
        """
        self.products = read_products(items, attributes, num_products)
        self.goals = read_goals(instructions, self.products)
        self._by_link = {asin.lower(): product for asin, product in self.products.items()}
        self._index = DocumentIndex(Document(asin, product.text()) for asin, product in self.products.items())
        self._first, self._turn_limit = first, turn_limit
        self.observation_space, self.action_space = AnyText(), AnyText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict[str, Any]]:
        """Opens the shop; `options={"task": n}` asks the n-th goal after `first`, else `seed` is n.

        Returns:
          The instruction with the first page, and info: task_id, success.
        """
        super().reset(seed=seed)
        task = (options or {}).get("task", seed)
        number = (self._first + (0 if task is None else task)) % len(self.goals)
        self.goal, self._task_id, self._turns = self.goals[number], f"webshop/{number}", 0
        self._open_search()
        return f"{self.goal.instruction}\n{self._page()}", {"task_id": self._task_id, "success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one turn; what a page does not offer changes nothing."""
        self._turns += 1
        found = re.search(r"(search|click)\[(.*?)\]", action.strip(), re.DOTALL)
        name, value = (found[1], found[2].strip()) if found else ("", "")
        earned, text = 0.0, ""
        if name == "search" and self._product is None and not self._hits:
            self._hits = [self.products[hit.docid] for hit in self._index.search(value, HITS)]
            text = "" if self._hits else "Nothing is found.\n"
        elif name == "click" and value.lower() == BUY and self._product:
            earned = reward(self._product, self._chosen, self.goal)
            info = {"task_id": self._task_id, "success": earned == 1.0, "bought": self._product.asin}
            return f"You have bought it. Your score: {earned:.2f}", earned, True, False, info
        elif name != "click" or not self._click(value.lower()):
            text = "This page has no such thing.\n"
        truncated = self._turns >= self._turn_limit
        return text + self._page(), earned, False, truncated, {"task_id": self._task_id, "success": False}

    def _open_search(self) -> None:
        self._hits: list[Product] = []
        self._product: Product | None = None
        self._first_hit, self._told, self._chosen = 0, "", {}

    def _click(self, what: str) -> bool:
        """Follows a link of the page, if it is there."""
        if what not in (link for _, link in self._links()):
            return False
        if what == BACK:
            self._open_search()
        elif what == PREVIOUS and self._told:
            self._told = ""
        elif what == PREVIOUS and self._product:
            self._product, self._chosen = None, {}
        elif what in (NEXT, PREVIOUS):
            self._first_hit += PAGE if what == NEXT else -PAGE
        elif self._product is None:
            self._product = self._by_link[what]
        elif what in TOLD:
            self._told = what
        else:
            self._chosen |= {name: value for name, value in self._links() if value == what}
        return True

    def _links(self) -> list[tuple[str, str]]:
        """(what it chooses, what is clicked) of all that the page offers."""
        if self._told:
            return [("", BACK), ("", PREVIOUS)]
        if self._product:
            options = [(name, value) for name, values in self._product.options.items() for value in values]
            return [("", BACK), ("", PREVIOUS), *options, *(("", button) for button in TOLD), ("", BUY)]
        if not self._hits:
            return []
        shown = self._hits[self._first_hit : self._first_hit + PAGE]
        turns = [NEXT] * (self._first_hit + PAGE < len(self._hits)) + [PREVIOUS] * (self._first_hit > 0)
        return [("", BACK), *(("", turn) for turn in turns), *(("", product.asin.lower()) for product in shown)]

    def _page(self) -> str:
        links = "".join(f" [{link}]" for name, link in self._links() if not name)
        if self._told:
            said = self._product.description if self._told == "description" else "\n".join(self._product.features)
            return f"{said}\nclick:{links}"
        if self._product:
            product = self._product
            lines = [f"{product.title}\nprice: ${product.price:.2f}"]
            for name, values in product.options.items():
                lines.append(
                    f"{name}:{''.join(f' [{value}]' for value in values)} chosen: {self._chosen.get(name, '')}"
                )
            return "\n".join([*lines, f"click:{links}"])
        if self._hits:
            shown = self._hits[self._first_hit : self._first_hit + PAGE]
            lines = [f"[{product.asin.lower()}] {product.title} ${product.price:.2f}" for product in shown]
            return "\n".join([*lines, f"click:{links}"])
        return "search[words]"
