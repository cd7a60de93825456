"""WebShop's published formats, in a shop of three made-up products, and rewards counted by hand."""

import dataclasses
import json

import pytest

from mpo_jax.environments import webshop_data
from mpo_jax.environments.webshop import WebShop
from mpo_jax.environments.webshop_data import alike, read_goals, read_products, reward


def product(asin, name, **changes):
    return {
        "asin": asin,
        "name": name,
        "full_description": "Made to last.",
        "small_description": ["machine washable", "for him"],
        "query": "mens shirts",
        "product_category": "Clothing › Men › Shirts",
        "pricing": "$24.50",
        "customization_options": {
            "Color": [{"value": "Navy/White ", "image": None}, {"value": "red"}],
            "size": [{"value": "large"}, {"value": "small"}],
        },
        "images": ["x.jpg"],
    } | changes


ITEMS = [
    product("B000000001", "Linen shirt with long sleeve"),
    product("B000000002", "Cotton shirt", pricing="$10.00$20.00", customization_options={}, small_description="cheap"),
    product(
        "B000000003",
        "Walnut shelf",
        query="shelves",
        product_category="Home › Shelves",
        pricing=None,
        customization_options=None,
        full_description=None,
    ),
    product("B000000001", "the same id again"),
    product("nan", "no id"),
]
ATTRIBUTES = {"B000000001": {"attributes": ["long sleeve", "easy care"], "instruction": None}}
HUMAN = {
    "B000000001": [
        {
            "instruction": "i want a linen shirt that is machine washable.",
            "instruction_attributes": ["machine washable", "easy care"],
            "instruction_options": ["navy | white", "large"],
        },
        {"instruction": "none", "instruction_attributes": [], "instruction_options": []},
    ],
    "B999999999": [{"instruction": "of no product", "instruction_attributes": ["x"], "instruction_options": []}],
}


@pytest.fixture
def files(tmp_path):
    found = []
    contents = {"items_shuffle": ITEMS, "items_ins_v2": ATTRIBUTES, "items_human_ins": HUMAN}
    for name, content in contents.items():
        found.append(tmp_path / f"{name}.json")
        found[-1].write_text(json.dumps(content))
    return [str(path) for path in found]


def test_products_are_read_as_they_are_published(files):
    products = read_products(*files[:2])
    assert list(products) == ["B000000001", "B000000002", "B000000003"]
    shirt, cotton, shelf = products.values()
    assert shirt.options == {"color": ("navy | white", "red"), "size": ("large", "small")}
    assert (shirt.price, shirt.attributes, shirt.categories) == (
        24.5,
        ("long sleeve", "easy care"),
        frozenset({"Clothing", "Men", "Shirts"}),
    )
    assert 10 <= cotton.price <= 20 and cotton.price == read_products(*files[:2])["B000000002"].price
    assert (shelf.price, shelf.options, shelf.description) == (100.0, {}, "")
    assert list(read_products(*files[:2], limit=2)) == ["B000000001", "B000000002"]


def test_goals_are_the_instructions_with_a_limit(files):
    (goal,) = read_goals(files[2], read_products(*files[:2]))
    assert goal.product.asin == "B000000001" and goal.options == ("navy | white", "large")
    assert goal.price_limit in (40.0, 50.0, 60.0)  # the higher of two of 30, 40, 50, 60
    text = "i want a linen shirt that is machine washable"
    assert goal.instruction == f"{text}, and price lower than {goal.price_limit:.2f} dollars"


def test_rewards_are_the_papers(files):
    products = read_products(*files[:2])
    shirt, cotton, shelf = products.values()
    (goal,) = read_goals(files[2], products)
    assert reward(shirt, {"color": "navy | white", "size": "large"}, goal) == 1.0  # (2 + 2 + 1) / (2 + 2 + 1)
    assert reward(shirt, {"color": "navy | white"}, goal) == 4 / 5
    assert reward(shirt, {"size": "small"}, goal) == 3 / 5
    assert reward(dataclasses.replace(shirt, price=99.0), {"size": "large"}, goal) == 3 / 5
    # "Cotton shirt" has 1 of the wanted name's 5 words, .2, and the same query: r_type 1; the price alone is met.
    assert reward(cotton, {}, goal) == 1 / 5
    other = dataclasses.replace(cotton, query="tops", categories=frozenset({"Clothing"}))
    assert reward(other, {}, goal) == 0.5 / 5
    assert reward(shelf, {}, goal) == 0.0  # no word in common


@pytest.mark.parametrize(
    ("a", "b", "score"),
    [
        ("easy care", "easy care fabric", 100.0),  # all words of one are in the other
        ("care, easy", "easy care", 100.0),
        ("red", "blue", 200 / 7),  # "e" is the longest common subsequence of 3 + 4 letters
        ("", "", 0.0),
    ],
)
def test_likeness_of_words(a, b, score):
    assert alike(a, b) == pytest.approx(score)


def play(shop, *actions):
    return [shop.step(action) for action in actions]


def test_a_scripted_customer_gets_all_of_the_reward(files):
    shop = WebShop(*files)
    text, info = shop.reset(options={"task": 0})
    assert text.startswith("i want a linen shirt") and text.endswith("search[words]")
    assert info == {"task_id": "webshop/0", "success": False}
    steps = play(
        shop,
        "search[linen shirt]",
        "click[B000000001]",
        "click[Features]",
        "click[< Prev]",
        "click[navy | white]",
        "click[large]",
        "click[Buy Now]",
    )
    assert "[b000000001] Linen shirt with long sleeve $24.50" in steps[0][0] and "B000000003" not in steps[0][0]
    assert "color: [navy | white] [red] chosen: \n" in steps[1][0]
    assert steps[2][0].startswith("machine washable\nfor him\nclick:")
    assert "chosen: navy | white" in steps[4][0] and "chosen: large" in steps[5][0]
    assert [step[1] for step in steps] == [0.0] * 6 + [1.0]
    assert steps[-1][2:4] == (True, False) and steps[-1][4]["success"]
    assert [step[0] for step in steps[:-1]] == [step[0] for step in again(shop, 6)]


def again(shop, number):
    shop.reset(seed=0)
    actions = ("search[linen shirt]", "click[b000000001]", "click[features]", "click[< prev]", "click[navy | white]")
    return play(shop, *actions, "I think.\nclick[large]")[:number]


def test_what_a_page_does_not_offer_changes_nothing_but_the_turns(files):
    shop = WebShop(*files, turn_limit=7)
    shop.reset(seed=0)
    steps = play(shop, "click[buy now]", "hello", "search[nothing like it]", "search[shirt]", "search[again]")
    assert ["no such thing" in step[0] for step in steps] == [True, True, False, False, True]
    assert "Nothing is found" in steps[2][0]
    back = play(shop, "click[back to search]", "click[b000000001]")
    assert back[0][0] == "search[words]" and back[1][2:4] == (False, True)


def test_a_search_of_many_has_pages(files, tmp_path):
    many = [product(f"B{n:09d}", f"shirt {n}") for n in range(25)]
    (tmp_path / "many.json").write_text(json.dumps(many))
    shop = WebShop(str(tmp_path / "many.json"), *files[1:])
    shop.reset(seed=0)
    first, second, third, fourth = (
        step[0] for step in play(shop, "search[shirt]", *["click[next >]"] * 2, "click[< prev]")
    )
    assert [text.count("[b0") for text in (first, second, third)] == [20, 20, 10]  # each as a line and as a link
    assert fourth == second and "next >" not in third and "< prev" not in first


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("items_shuffle", "{", r"items_shuffle\.json: cannot be read"),
        ("items_shuffle", "{}", "holds a dict, expected a list"),
        ("items_shuffle", "[]", "no products"),
        ("items_shuffle", '[{"asin": "B1"}]', "lacks what it must have: KeyError"),
        ("items_shuffle", "[7]", "lacks what it must have: TypeError"),
        ("items_human_ins", "{}", "no instruction is about one of the 3 products"),
        ("items_human_ins", '{"B000000001": [{"instruction": "x"}]}', "an instruction of B000000001 lacks"),
    ],
)
def test_faults_are_named(files, tmp_path, name, content, message):
    (tmp_path / f"{name}.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        WebShop(*files)


def test_files_that_are_not_there_are_named(files):
    with pytest.raises(ValueError, match=r"nowhere\.json: cannot be read"):
        webshop_data.read_products("nowhere.json", files[1])
