"""A server as the engine of a training rollout: the episodes of our own sampler, with every published version."""

import dataclasses
import itertools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rollout.served import Served
from tornado import web
from training import runs

from experiments import engines, environments, playing
from mpo_jax.models import huggingface, weights
from mpo_jax.rollout.batcher import Batcher
from mpo_jax.rollout.openai_engine import EngineRefused
from mpo_jax.rollout.openai_server import Service, make_app
from mpo_jax.rollout.worker import run_worker
from mpo_jax.store.sqlite import EpisodeStore
from mpo_jax.store.weights import PublishedWeights


@pytest.fixture
def published(tmp_path):
    return PublishedWeights(tmp_path / "weights")


@pytest.fixture
def served(published):
    """Our server over the sampler of the tiny model, which begins with weights that nobody has published."""
    model = runs.model()
    engine = engines.make_sampler(runs.config(), model)
    engine.load(jax.tree.map(lambda x: x * 0, model.params), 0)

    def load(path):
        version = next(v for v in range(9) if str(published.path(v).resolve()) == path)
        arrays, _ = published.load(version)
        engine.load(weights.unflatten(model.params, arrays), version)

    service = Service(Batcher(engine), model.tokenizer, model.tokenizer.tokenizer, name="tiny", load=load)
    server = Served(make_app(service))
    yield server
    server.close()
    service.batcher.close()


def config(server, **section):
    made = runs.config(group_size=2)
    made.server.update({"url": f"{server.root}/v1", "model": "tiny"} | section)
    return made


def episodes(made, published, folder, versions):
    """Two groups of each version, as a worker makes them that finds one after the other published."""
    setting = environments.build(made, runs.model().tokenizer)
    rollout, restore = playing.make_training_rollout(made, runs.model(), setting, published)
    store = EpisodeStore(folder)
    terms = playing.make_terms(made, 0)
    for step, version in enumerate(versions):
        arrays = weights.flatten(runs.model().params)
        published.publish({name: np.asarray(x) * (1 + version) for name, x in arrays.items()}, version)
        done = itertools.count()
        run_worker(
            rollout,
            store,
            published,
            terms,
            should_stop=lambda done=done, step=step: store.pending() >= 2 or next(done) > 200,
            restore=restore,
        )
        store.take(2, step)
    return list(store.episodes())


@pytest.mark.slow
def test_a_server_samples_what_our_sampler_does_with_every_published_version(served, published, tmp_path):
    there = episodes(config(served), published, tmp_path / "there.sqlite", [0, 1])
    plain = PublishedWeights(tmp_path / "other")
    here = episodes(runs.config(group_size=2), plain, tmp_path / "here.sqlite", [0, 1])
    assert [e.tokens for e in there[:8]] == [e.tokens for e in here[:8]] and len(there) >= 8
    for ours, theirs in zip(here[:8], there[:8], strict=True):
        np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=1e-5)
    assert {e.versions[0] for e in there[:4]} == {0} and {e.versions[0] for e in there[4:8]} == {1}


class Recorder(web.RequestHandler):
    """A server that notes where it is to read weights, or has no way to."""

    def initialize(self, asked):
        self.asked = asked

    def post(self):
        self.asked.append(json.loads(self.request.body)["model_path"])
        self.write({"success": True})


@pytest.fixture
def recording():
    asked = []
    server = Served(web.Application([("/update_weights_from_disk", Recorder, {"asked": asked})]))
    yield server, asked
    server.close()


def test_a_folder_has_the_newest_version_as_hugging_face_writes_it(recording, published, tmp_path):
    server, asked = recording
    shape = dataclasses.replace(runs.model().config, smeared_keys=False)  # which no family of Hugging Face has
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), weights.shapes(shape))
    model = dataclasses.replace(runs.model(), config=shape, params=params)
    engine = engines.make_engine(config(server, folder=str(tmp_path / "hf")), model, published)
    for version in (0, 1):
        engine.load(jax.tree.map(lambda x, v=version: x + v, params), version)
    assert asked == [str(tmp_path / "hf" / f"version-{version:08d}") for version in (0, 1)]
    assert os.listdir(tmp_path / "hf") == ["version-00000001"]
    _, found = huggingface.load(tmp_path / "hf" / "version-00000001")
    assert all((np.asarray(x) == 1).all() for x in jax.tree.leaves(found)) and engine.version == 1


def test_a_server_that_cannot_read_new_weights_is_refused_before_it_samples(published):
    server = Served(web.Application([]))
    try:
        engine = engines.make_engine(config(server), runs.model(), published)
        assert engine.version == -1  # what it has is nobody's
        with pytest.raises(EngineRefused, match="update_weights_from_disk: status 404"):
            engine.load(None, 0)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("changes", "section", "message"),
    [({}, {"model": ""}, "no server.model"), ({"router_replay": True}, {}, "router_replay: a server")],
)
def test_faults_are_named(published, changes, section, message):
    made = runs.config(**changes)
    made.server.update({"url": "http://127.0.0.1:1/v1", "model": "x"} | section)
    with pytest.raises(ValueError, match=message):
        engines.make_engine(made, runs.model(), published)
