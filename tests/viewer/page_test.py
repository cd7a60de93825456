"""The page: what it holds, that no text becomes markup, and how it behaves in a browser and under the keyboard."""

import asyncio
import base64
import hashlib
import html.parser
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viewer.browser import CHROMIUM, Browser

from mpo_jax.store.episode import Episode
from mpo_jax.viewer.page import embed, render

HOSTILE = [
    "</script><script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "<!--<script>",
    "{{script}} {{data}} \\u003c ]]> \u2028 \x00 \ud800",
    "javascript:document.title='taken'",
    "'\"><svg/onload=document.title='taken'>",
]


def make_episode(group, *, reward=1.0, version=0, end="terminated", **metadata):
    """Two turns, each with one id read and one sampled."""
    return Episode(
        episode_id=f"{group:08d}-000",
        group_id=group,
        task_id=f"task {group}",
        tokens=[0, 1, 0, 1],
        action_mask=[False, True, False, True],
        executable_mask=[False, True, False, True],
        turn_ids=[0, 0, 1, 1],
        logprobs=[0.0, -0.5, 0.0, -2.0],
        rewards=[0.0, reward],
        state_ids=[0, 1],
        versions=[version, version + 1],
        end_reason=end,
        metadata={"observations": [f"do {group}", "ok"], "actions": ["a", "b"]} | metadata,
    )


def page(episodes, texts=("read", "act"), **options):
    return render(episodes, title="runs/x", pieces=lambda ids: [texts[i] for i in ids], **options)


class Document(html.parser.HTMLParser):
    """The tags of a page and the text of its data."""

    def __init__(self, text):
        super().__init__(convert_charrefs=False)
        self.tags, self.attributes, self.data, self.element = [], [], {}, None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.element = dict(attrs).get("id", tag)

    def handle_data(self, data):
        self.data[self.element] = self.data.get(self.element, "") + data


def credit_of(*episodes):
    rows = {"advantage": [0, 0.5, 0, -1.0], "ratio": [1, 1.2, 1, 0.5], "gap": [0, 0.25, 0, math.nan]}
    return {episode.episode_id: {k: np.array(v, np.float32) for k, v in rows.items()} for episode in episodes}


def test_the_data_are_what_was_given():
    first, failed = make_episode(3, version=2, question="why?"), make_episode(4, reward=math.nan, end="truncated")
    text = page([first, failed], credit=credit_of(first), steps={3: 7}, metrics=[
        {"step": 0, "success": 0.1, "entropy": 1.0}, {"step": 1, "success": 0.3, "entropy": None}
    ])  # fmt: skip
    data = json.loads(Document(text).data["data"])
    one, two = data["episodes"]
    assert one["pieces"] == ["read", "act"] * 2 and one["sampled"] == "0101" and one["turns"] == [2, 2]
    assert one["credit"] == {
        "logprob": [-0.5, -2.0], "advantage": [0.5, -1.0], "ratio": [1.2, 0.5], "gap": [0.25, None],
    }  # fmt: skip
    assert (one["step"], one["reward"], one["versions"], one["notes"]) == (7, 1.0, [2, 3], {"question": "why?"})
    assert (one["prompt"], two["prompt"]) == ("why?", "do 4")
    assert two["step"] is None and two["reward"] is None and two["credit"] == {"logprob": [-0.5, -2.0]}
    assert data["curves"] == [{"name": "success", "points": [[0, 0.1], [1, 0.3]]}]


def test_an_episode_that_failed_before_it_acted_is_shown():
    lists = ("tokens", "action_mask", "executable_mask", "turn_ids", "logprobs", "rewards", "state_ids", "versions")
    failed = Episode(episode_id="e", group_id=0, task_id="t", end_reason="truncated", **{name: [] for name in lists})
    (row,) = json.loads(Document(page([failed])).data["data"])["episodes"]
    assert row["turns"] == [] and row["credit"] == {} and row["reward"] == 0


def test_channels_that_do_not_fit_are_refused():
    episode = make_episode(0)
    with pytest.raises(ValueError, match=r"'00000000-000': ratio has 3 numbers, expected 4"):
        page([episode], credit={episode.episode_id: {"ratio": np.ones(3)}})
    with pytest.raises(ValueError, match="1 pieces of text, expected 4"):
        render([episode], title="", pieces=lambda ids: ["x"])


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_becomes_markup(hostile):
    plain, tainted = page([make_episode(0)]), page(
        [make_episode(0, question=hostile, observations=[hostile])], texts=(hostile, hostile)
    )  # fmt: skip
    assert Document(tainted).tags == Document(plain).tags
    assert json.loads(Document(tainted).data["data"])["episodes"][0]["pieces"] == [hostile] * 4


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=20) | st.floats(), max_size=3) | st.dictionaries(st.text(max_size=9), st.floats()))
def test_embedded_data_hold_no_sign_of_markup_and_come_back(value):
    text = embed(value)
    assert not re.search(r"[<>&\u2028\u2029]", text)
    assert text.isascii()

    def as_shown(value):
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, list):
            return [as_shown(x) for x in value]
        return {k: as_shown(v) for k, v in value.items()} if isinstance(value, dict) else value

    assert json.loads(text) == as_shown(value)


def test_the_policy_lets_only_the_pages_own_script_and_style_run():
    text = page([make_episode(0)])
    (policy,) = [value for name, value in Document(text).attributes if name == "content" and "default-src" in value]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for tag, directive in (("script>", "script-src"), ("style>", "style-src")):
        inside = re.search(rf"<{tag}(.*?)</{tag}", text, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)  # nothing is fetched from anywhere
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", text)


def write(folder, text):
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return path.as_uri()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_in_a_browser(tmp_path):
    """Filters, keys, shades and hostile text, in headless Chromium."""
    episodes = [make_episode(i, reward=float(i % 2), version=i, end="terminated" if i else "truncated")
                for i in range(6)]  # fmt: skip
    episodes.append(make_episode(6, question=HOSTILE[1], note=HOSTILE[0]))
    metrics = [{"step": step, "success": step / 10, HOSTILE[0]: 1.0} for step in range(5)]
    text = page(episodes, texts=(HOSTILE[0], HOSTILE[5]), credit=credit_of(*episodes), metrics=metrics, steps={1: 2})

    async def use():
        async with Browser(tmp_path / "profile") as browser:
            await browser.open(write(tmp_path, text))
            count, heading = "find('count').textContent", "document.querySelector('h2').textContent"
            assert await browser.run(count) == "7 of 7 episodes, 4 with a reward above 0 (57 %)"
            assert await browser.run("document.title") == "runs/x"
            await browser.press("j")
            assert await browser.run(heading) == "do 1"
            assert await browser.run("document.querySelector('.curve line').getAttribute('x1')") == "50"
            await browser.press("End", "k", "Home", "k")
            assert await browser.run(heading) == "do 0"
            # The second token's advantage is −1, the largest of the page: full shade, in the colour of minus.
            shades = "[...document.querySelectorAll('.token')].map(t => t.style.background)"
            plus, minus = await browser.run(shades)
            assert "--plus" in plus and "0.310" in plus  # half of .62
            assert "--minus" in minus and "0.620" in minus
            await browser.press("t")  # the mean of one token is its own
            assert await browser.run(shades) == [plus, minus]
            await browser.press("2")
            # log 1.2 / log 2 · .62 = .163
            assert "0.163" in (await browser.run(shades))[0]
            pressed = "document.querySelector('[aria-pressed=true]').textContent"
            assert await browser.run(pressed) == "Ratio 2"
            await browser.press("3")
            assert (await browser.run(shades))[1] == "transparent"  # NaN
            await browser.press("n", "n")
            assert await browser.run("document.querySelector('.turn.current header strong').textContent") == "Turn 1"
            await browser.press("c")
            assert await browser.run("find('curves').hidden") is True
            # Filters: text, reward, version, end; hostile text is found as text.
            await browser.press("/", *"task 3", "Escape")
            assert await browser.run(heading) == "do 3"
            assert (await browser.run(count)).startswith("1 of 7")
            await browser.press("x")
            await browser.run("new Promise(requestAnimationFrame)")
            filters = [
                ({"reward-min": "0.5"}, 4),
                ({"version-max": "1"}, 3),
                ({"version-min": "3", "version-max": "4"}, 3),
                ({"end": "truncated"}, 1),
                ({"task": "onerror"}, 1),
            ]
            for fields, number in filters:
                script = "".join(f"find('{name}').value = '{value}';" for name, value in fields.items())
                await browser.run(f"find('filters').reset(); {script} filter()")
                assert (await browser.run(count)).startswith(f"{number} of 7"), fields
            assert await browser.run(heading) == HOSTILE[1]
            await browser.run("find('task').value = 'nowhere'; filter()")
            assert "No episode" in await browser.run("find('episode').textContent")
            await browser.press("?")
            assert await browser.run("find('help').open") is True
            assert await browser.run("document.images.length + document.querySelectorAll('#episode svg').length") == 0
            assert await browser.run("document.title") == "runs/x" and browser.errors == []

    asyncio.run(asyncio.wait_for(use(), 120))
