import threading

import numpy as np
import pytest

from libcolibri.encoder import EncodedText, Encoder, _batches
from libcolibri.errors import ConfigError, FormatError
from tests.encoder import tiny_bert
from tests.oracle import encoder as reference

TEXTS = [
    "The expert cache keeps a matrix of the disk.",
    "模型。专家",
    "a",
    "memory, memory and more memory of the disk 123",
    "",
    "The expert cache keeps a matrix of the disk, a matrix of memory",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_bert.write_model(tmp_path_factory.mktemp("encoder") / "tiny-bert")


@pytest.fixture(scope="module")
def encoder(model):
    with Encoder.open(model, threads=2) as encoder:
        yield encoder


def test_hidden_states_and_embedding_equal_the_reference(encoder):
    expected = tiny_bert.oracle()
    ids = EncodedText(tuple(expected["ids"].tolist()))
    vector = encoder.embed_encoded([ids])[0]
    hidden = encoder._program.hidden[: len(ids.ids)]
    assert np.abs(hidden - expected["last_hidden"]).max() < 1e-3 * np.ptp(expected["last_hidden"])
    np.testing.assert_allclose(vector, expected["embedding"], atol=1e-5)


def test_oracle_equals_the_reference():
    expected = tiny_bert.oracle()
    hidden = reference.encode(tiny_bert.read_tensors(), tiny_bert.read_config(), expected["ids"])
    np.testing.assert_allclose(hidden, expected["last_hidden"], atol=1e-5)


def test_texts_equal_the_oracle(encoder):
    tensors, config = tiny_bert.read_tensors(), tiny_bert.read_config()
    for text, vector in zip(TEXTS, encoder.embed(TEXTS), strict=True):
        hidden = reference.encode(tensors, config, np.array(encoder.encode(text).ids))
        np.testing.assert_allclose(vector, reference.mean_embedding(hidden), atol=1e-5)
        assert abs(np.linalg.norm(vector) - 1) < 1e-6


@pytest.mark.parametrize("kind, least", [("f16", 0.99999), ("bf16", 0.99999), ("q8_0", 0.999), ("q4_1", 0.9), ("q4_0", 0.9)])
def test_tensor_types(kind, least, encoder, tmp_path):
    with Encoder.open(tiny_bert.write_model(tmp_path / kind, kind), threads=1) as other:
        assert (other.embed(TEXTS) * encoder.embed(TEXTS)).sum(-1).min() > least


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
def test_batch_and_threads_change_no_bit(kind, tmp_path):
    model = tiny_bert.write_model(tmp_path / kind, kind)
    with Encoder.open(model, threads=1) as one, Encoder.open(model, threads=3) as three:
        alone = np.concatenate([one.embed([text]) for text in TEXTS])
        for vectors in (one.embed(TEXTS), three.embed(TEXTS), three.embed(TEXTS[::-1])[::-1], three.embed(TEXTS * 40)[: len(TEXTS)]):
            assert (vectors.view(np.uint32) == alone.view(np.uint32)).all()


def test_threads_may_share_an_encoder(encoder):
    expected = encoder.embed(TEXTS)
    found: list[np.ndarray] = []
    workers = [threading.Thread(target=lambda: found.append(encoder.embed(TEXTS))) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 4 and all((vectors == expected).all() for vectors in found)


def test_long_text_is_cut_and_says_so(encoder):
    text = "memory of the disk " * 40
    encoded = encoder.encode(text)
    assert encoder.max_tok == 64 and encoder.count_tok(text) == 162
    assert len(encoded.ids) == 64 and encoded.dropped_tok == 98
    assert encoded.ids[0] == tiny_bert.CLS and encoded.ids[-1] == tiny_bert.SEP
    assert encoder.encode("memory").dropped_tok == 0
    assert np.isfinite(encoder.embed([text])).all()


def test_control_tokens_in_a_text_stay_text(encoder):
    assert tiny_bert.SEP not in encoder.encode("a [SEP] b").ids[1:-1]


def test_no_text(encoder):
    assert encoder.embed([]).shape == (0, 64)


def test_one_string_is_refused(encoder):
    with pytest.raises(ConfigError, match="list of texts"):
        encoder.embed("memory")


def test_closed_encoder_is_refused(model):
    encoder = Encoder.open(model, threads=1)
    encoder.close()
    encoder.close()
    with pytest.raises(ConfigError, match="closed"):
        encoder.embed(["memory"])


def test_cls_pooling(tmp_path):
    expected = tiny_bert.oracle()
    with Encoder.open(tiny_bert.write_model(tmp_path / "cls", config={"encoder": {"pooling": "cls"}}), threads=1) as encoder:
        vector = encoder.embed_encoded([EncodedText(tuple(expected["ids"].tolist()))])[0]
    first = expected["last_hidden"][0]
    np.testing.assert_allclose(vector, first / np.linalg.norm(first), atol=1e-5)


def test_xlm_roberta_is_bert_with_positions_from_behind_the_padding(encoder, tmp_path):
    tensors, name = tiny_bert.read_tensors(), "embeddings.position_embeddings.weight"
    tensors[name] = np.pad(tensors[name], ((2, 0), (0, 0)))
    config = {"model_type": "xlm-roberta", "pad_token_id": 1, "max_position_embeddings": len(tensors[name])}
    folder = tiny_bert.write_model(tmp_path / "xlm", config=config, tensors=tensors, family="xlm-roberta")
    with Encoder.open(folder, threads=1) as other:
        assert other.max_tok == encoder.max_tok
        assert np.array_equal(other.embed(TEXTS), encoder.embed(TEXTS))


def test_settings_and_fingerprint(model, encoder, tmp_path):
    settings = {"pooling": "mean", "normalize": True, "max_tok": 16, "query_prefix": "query: ", "passage_prefix": "passage: "}
    with Encoder.open(tiny_bert.write_model(tmp_path / "settings", config={"encoder": settings}), threads=1) as other:
        assert (other.max_tok, other.query_prefix, other.passage_prefix, other.dimension) == (16, "query: ", "passage: ", 64)
        assert other.fingerprint != encoder.fingerprint
    with Encoder.open(tiny_bert.write_model(tmp_path / "again"), threads=1) as again:
        assert again.fingerprint == encoder.fingerprint


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_act": "gelu_new"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"num_attention_heads": 8}, "multiples of 16"),
        ({"something_new": 3}, "something_new"),
        ({"encoder": {"pooling": "max"}}, "pooling"),
    ],
)
def test_unsupported_configs_are_refused(change, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        Encoder.open(tiny_bert.write_model(tmp_path / "odd", config=change))


def test_missing_and_surplus_tensors_are_refused(tmp_path):
    tensors = tiny_bert.read_tensors()
    short = {name: tensor for name, tensor in tensors.items() if name != "encoder.layer.2.output.dense.bias"}
    with pytest.raises(FormatError, match=r"encoder.layer.2.output.dense.bias is missing"):
        Encoder.open(tiny_bert.write_model(tmp_path / "short", tensors=short))
    with pytest.raises(FormatError, match="adapter"):
        Encoder.open(tiny_bert.write_model(tmp_path / "surplus", tensors=tensors | {"adapter.weight": np.zeros((16, 32), np.float32)}))


def test_batches_hold_every_text_once():
    lengths = np.random.default_rng(0).integers(2, 64, 100).tolist()
    batches = _batches(lengths, 128)
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    assert max(sum(lengths[i] for i in batch) for batch in batches) <= 128
