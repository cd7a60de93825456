"""The warm start: a tiny model imitates a noisy scripted policy, and learns to copy names that it has never seen.

A small transformer does not learn to copy from observations by imitating a few hundred real names: it learns the
names. So most demonstrations are played over made-up names, and some sequences are nothing but things to copy.

A language model imitates given sequences instead, by low-rank adapters.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mpo_jax.environments.corpus import factbook
from mpo_jax.environments.demonstrations import demonstrate, made_up_name
from mpo_jax.environments.questions import Question, questions
from mpo_jax.environments.search import SearchEnvironment
from mpo_jax.environments.search_policy import ScriptedPolicy
from mpo_jax.models import lora
from mpo_jax.models.config import TransformerConfig
from mpo_jax.models.evaluation import token_logprobs
from mpo_jax.models.pretrained import Pretrained
from mpo_jax.models.tokenizer import SPECIALS, ChatTokenizer
from mpo_jax.models.transformer import Transformer
from mpo_jax.store.episode import Episode
from mpo_jax.training.batching import pack
from mpo_jax.types import Array, Trajectories

Transcript = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """What the warm start is made of.

    Attributes:
      noise: of the scripted policy; its mistakes are imitated too, which leaves reinforcement learning its part.
      copying: share of sequences that repeat random ids, once copying is learnt; before that, all of them.
      copying_loss: nats a token below which copying is made harder.
      renaming: share of demonstrations over made-up names.
      hinting: share of demonstrations in which hints foretell the actions, for privileged hindsight (TASPO).
      observation_weight: of the loss on what the environment says, against 1 on actions.
      observation_tokens: most ids of an observation, as in the rollout.
    """

    noise: float = 0.0
    copying: float = 0.1
    copying_loss: float = 1.0
    renaming: float = 0.8
    hinting: float = 0.15
    observation_weight: float = 0.1
    observation_tokens: int = 80


def tokenizer_texts() -> Iterator[str]:
    """What the tokenizer is trained on: every document's fields, and the words around the names in transcripts.

    Transcripts as they are would make the names of training questions shorter than those of held-out ones, and a model
    that reads short names does not learn to copy long ones.
    """
    for document in factbook().documents:
        for name, text in document.fields:
            yield f"{document.title}: {name}: {' '.join(text.split()[:12])}"
    environment, policy = SearchEnvironment(), ScriptedPolicy()
    for question in questions("train"):
        transcript = demonstrate(question, policy, environment, rename=dict.fromkeys(question.entities, ""))
        yield transcript[0][0]  # the question
        for _, action in transcript:
            yield action


class Demonstrations:
    """An endless, seeded stream of packed batches."""

    def __init__(self, tokenizer: ChatTokenizer, curriculum: Curriculum, *, rows: int, row_tokens: int, seed: int):
        self.tokenizer, self.curriculum = tokenizer, curriculum
        self.rows, self.row_tokens = rows, row_tokens
        self.rng, self.difficulty = random.Random(seed), 0.0
        self.questions = questions("train")
        self.environment = SearchEnvironment()
        self.policy = ScriptedPolicy(curriculum.noise, self.rng)

    def batch(self) -> Trajectories:
        """The next batch: rows of whole sequences, the emptiest rows of a surplus left out."""
        if self.difficulty < 1:
            # Short rows, since attention over what is packed beside a short sequence would be wasted.
            return self._pack(self._copying, 6 * self.rows, self.row_tokens // 6)
        copying = self.curriculum.copying
        return self._pack(
            lambda: self._copying() if self.rng.random() < copying else self._demonstration(),
            self.rows,
            self.row_tokens,
        )

    def learnt(self, loss: float) -> None:
        """Makes copying a little harder where the loss on the last batch was low."""
        if loss < self.curriculum.copying_loss:
            self.difficulty = min(self.difficulty + 0.02, 1.0)

    def _pack(self, sequence, rows: int, row_tokens: int) -> Trajectories:
        episodes, room = [], rows * row_tokens
        while room > 0:
            ids, mask = sequence()
            episodes.append(_as_episode(ids[:row_tokens], mask[:row_tokens]))
            room -= len(episodes[-1].tokens)
        batch, _ = pack(episodes, row_tokens=row_tokens, row_sequences=64, row_multiple=rows)
        return jax.tree.map(lambda x: x[:rows], batch)

    def _copying(self) -> tuple[list[int], list[bool]]:
        """Random ids, then random stretches of them again; all but the first id of a stretch can be foretold.

        From 4 to 9 of the first 128 ids in 32 tokens, where copying heads form within some hundred steps, to 48 of all
        in 128: there a small model would first have to learn which of very many tokens to look at.
        """
        difficulty = self.difficulty
        first, vocab = len(SPECIALS), self.tokenizer.vocab_size
        pool = range(first, int(128 + difficulty * (vocab - 128)))
        source = self.rng.sample(pool, self.rng.randint(4, 9 + int(39 * difficulty)))
        ids, mask, length = list(source), [False] * len(source), 32 + int(96 * difficulty)
        while len(ids) < length:
            start = self.rng.randrange(len(source) - 2)
            stretch = source[start : start + self.rng.randint(3, 12)]
            ids += stretch
            mask += [False] + [True] * (len(stretch) - 1)
        return ids[:length], mask[:length]

    def _demonstration(self) -> tuple[list[int], list[bool]]:
        question = self.rng.choice(self.questions)
        rename = self._new_names(question) if self.rng.random() < self.curriculum.renaming else None
        transcript = demonstrate(question, self.policy, self.environment, rename)
        hinted = self.rng.random() < self.curriculum.hinting
        ids, mask = [], []
        for observation, action in transcript:
            read = self.tokenizer.render_hint(action) if hinted and self.rng.random() < 0.7 else []
            read += self.tokenizer.render_observation(observation, self.curriculum.observation_tokens)
            acted = [*self.tokenizer.encode(action), self.tokenizer.end_of_turn]
            ids += read + acted
            mask += [False] * len(read) + [True] * len(acted)
        return ids, mask

    def _new_names(self, question: Question) -> dict[str, str]:
        """Half of the new names are pronounceable, half are random ids spelt out, so that every id is copied."""

        def name() -> str:
            if self.rng.random() < 0.5:
                return made_up_name(self.rng)
            ids = [self.rng.randrange(300, self.tokenizer.vocab_size) for _ in range(self.rng.randint(1, 5))]
            return self.tokenizer.decode(ids) or made_up_name(self.rng)

        return {old: name() for old in question.entities}


def _as_episode(ids: list[int], mask: list[bool]) -> Episode:
    """A sequence to imitate in the form of an episode of one turn."""
    return Episode(
        episode_id="",
        group_id=0,
        task_id="",
        tokens=ids,
        action_mask=mask,
        executable_mask=mask,
        turn_ids=[0] * len(ids),
        logprobs=[0.0] * len(ids),
        rewards=[0.0],
        state_ids=[0],
        versions=[0],
        end_reason="terminated",
    )


def imitate(
    model: Pretrained,
    demonstrations: Demonstrations,
    *,
    num_steps: int,
    learning_rate: float,
    report: Callable[[int, Array], None] = lambda step, loss: None,
) -> nnx.State:
    """Trains a transformer on demonstrations by cross-entropy (AdamW, warm-up and cosine decay).

    Args:
      model: where to begin.
      demonstrations: the data.
      num_steps: gradient steps.
      learning_rate: the highest.
      report: called with every step and its loss.

    Returns:
      The parameters.
    """
    loss, optimizer = _loss_of(model.config), _make_optimizer(learning_rate, num_steps)
    params = model.params
    optimizer_state = optimizer.init(params)

    @jax.jit
    def step(params, optimizer_state, batch, observation_weight):
        value, grads = jax.value_and_grad(loss)(params, batch, observation_weight)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, value

    for index in range(num_steps):
        copies = demonstrations.difficulty < 1  # nothing but copying, where the rest cannot be foretold
        weight = 0.0 if copies else demonstrations.curriculum.observation_weight
        params, optimizer_state, value = step(params, optimizer_state, demonstrations.batch(), weight)
        if copies:
            demonstrations.learnt(float(value))
        report(index, value)
    return params


def imitate_by_adapters(
    config: TransformerConfig,
    params: nnx.State,
    settings: lora.LoraConfig,
    sequences: Sequence[tuple[list[int], list[bool]]],
    *,
    num_steps: int,
    row_tokens: int,
    learning_rate: float,
    seed: int = 0,
    report: Callable[[int, Array], None] = lambda step, loss: None,
) -> nnx.State:
    """Trains low-rank adapters on the actions in sequences, a row of them a step; the model itself stays as it is.

    Args:
      config: the model's shape.
      params: its parameters.
      settings: of the adapters.
      sequences: ids of each, at most `row_tokens`, and which of them are actions; gone through in a seeded order.
      num_steps: gradient steps.
      row_tokens: of a row.
      learning_rate: the highest.
      seed: of the adapters and of the order.
      report: called with every step and its loss.

    Returns:
      The adapters.

    Raises:
      ValueError: no sequences, or one longer than a row.
    """
    if not sequences:
        raise ValueError("there are no sequences to imitate")
    loss, optimizer = _loss_of(config), _make_optimizer(learning_rate, num_steps)
    adapters = lora.init(settings, params, jax.random.key(seed))
    optimizer_state = optimizer.init(adapters)
    rows = _rows([_as_episode(*one) for one in sequences], row_tokens, random.Random(seed))

    @jax.jit
    def step(base, adapters, optimizer_state, batch):
        value, grads = jax.value_and_grad(lambda own: loss(lora.merge(settings, base, own), batch, 0.0))(adapters)
        updates, optimizer_state = optimizer.update(grads, optimizer_state, adapters)
        return optax.apply_updates(adapters, updates), optimizer_state, value

    for index in range(num_steps):
        adapters, optimizer_state, value = step(params, adapters, optimizer_state, next(rows))
        report(index, value)
    return adapters


def _rows(episodes: list[Episode], row_tokens: int, rng: random.Random) -> Iterator[Trajectories]:
    """Rows of whole episodes, without end: all of them in one order, then in another."""
    waiting, row = [], []
    while True:
        waiting = waiting or rng.sample(episodes, len(episodes))
        if row and sum(len(one.tokens) for one in (*row, waiting[-1])) > row_tokens:
            yield pack(row, row_tokens=row_tokens, row_sequences=64)[0]
            row = []
        row.append(waiting.pop())


def _loss_of(config: TransformerConfig) -> Callable[[nnx.State, Trajectories, float | Array], Array]:
    """The mean negative log-prob of actions, and of other tokens at a weight."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))

    def loss(params: nnx.State, batch: Trajectories, observation_weight: float | Array) -> Array:
        logprobs, _ = token_logprobs(nnx.merge(graph, params), batch)
        weights = jnp.where(batch.action_mask, 1.0, observation_weight) * (batch.positions > 0)
        total = jnp.sum(weights)
        return -jnp.sum(weights * logprobs) / jnp.where(total > 0, total, 1.0)  # a row may have nothing to imitate

    return loss


def _make_optimizer(learning_rate: float, num_steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, num_steps // 20 + 1, num_steps)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
