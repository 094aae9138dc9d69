"""Training computes what the server does, its pictures are what their answers say, and evaluation is held
out."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from contracts.specs import ImageSpec
from model_families.default_model import compose
from model_families.default_model.adapter import split_adapter
from model_families.default_model.shipped import read_shipped, write_shipped
from model_families.vision.patchify import Patchifier
from tests.tiny_models import build_tokenizer, randomise, reference_model, reference_tokenizer
from training.seeing import checkpoints
from training.seeing.batches import Batch, DataConfig, HeldOut, Training, pack, shown_tokens
from training.seeing.conversations import DEFAULT_SYSTEM, IGNORED, Row, Words, single, talk
from training.seeing.decoder import RANKS, Decoder
from training.seeing.export import shipped_tensors, tower_tensors
from training.seeing.layout import lay_out, letter_cells
from training.seeing.make_plain_talk import answer_all, questions
from training.seeing.model import Seeing
from training.seeing.palette import COLOURS, SHAPES, VARIANTS, shape_mask
from training.seeing.plain_talk import plain_talk
from training.seeing.questions import ASKED, TASKS, Exchange, ask, ask_about_two, ask_task
from training.seeing.scenes import CELL, COUNTS, LABEL_OF, LABELS, Painter, Scene, Thing, place_of
from training.seeing.sprites import Sprites, emoji_list
from training.seeing.tower import CONFIG, Looked, TrainedTower, new_tower, patches
from training.seeing.vocabulary import dictionary, held_out, held_out_pair, split_words

WORDS = ("stone", "river", "cloud", "table", "green", "house", "letter", "window", "garden", "music", "paper")


def llama_config(width):
    return LlamaConfig(
        vocab_size=287,
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1234.0},
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A composed checkpoint of a tiny language model and a tiny drawn tower."""
    llama = LlamaForCausalLM(llama_config(64)).float().eval()
    randomise(llama, seed=3, num_live_rows=287)
    directory = tmp_path_factory.mktemp("composed")
    compose.compose(llama, build_tokenizer(), directory)
    return directory


@pytest.fixture(scope="module")
def painter(tmp_path_factory):
    return Painter(Sprites(tmp_path_factory.mktemp("no_fonts")), WORDS, "train")


@pytest.fixture
def small_tower():
    config = replace_config(depth=2, hidden_size=32, intermediate_size=48, num_heads=2)
    return new_tower(config, torch.randn(50, 64), seed=1)


def replace_config(**changes):
    import msgspec

    depth = changes.get("depth", CONFIG.depth)
    return msgspec.structs.replace(
        CONFIG, out_hidden_size=64, fullatt_block_indexes=tuple(range(depth)), **changes
    )


def test_the_tower_is_the_familys(small_tower):
    trained = TrainedTower(small_tower, 3, torch.float32)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 56, 84, 3), dtype=np.uint8))
    spec = ImageSpec(
        patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=1, max_pixels=10**6, resample="bicubic"
    )
    flat = torch.empty(2 * 4 * 6, small_tower.config.patch_width)
    for rows, picture in zip(flat.split(4 * 6), pixels, strict=True):
        Patchifier(spec, torch.device("cpu"), torch.float32).write(rows, picture)
    quiet = torch.zeros(2)
    assert torch.allclose(patches(pixels, quiet, small_tower.config).flatten(0, 1), flat, atol=1e-5)
    with torch.no_grad():
        expected = small_tower(flat, [(1, 4, 6)] * 2)
        assert torch.allclose(trained(pixels, quiet).flatten(0, 1), expected, atol=1e-4)
        assert not torch.allclose(trained(pixels, torch.full((2,), 20.0)).flatten(0, 1), expected, atol=1e-4)


def test_the_decoder_is_the_checkpoints(checkpoint):
    decoder = Decoder(checkpoint, torch.float32)
    reference = reference_model(checkpoint)
    ids = torch.randint(3, 280, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 3, 3, 3, 5, 6, 7, 8, 9], [0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9]])
    positions = torch.stack([positions[0], positions[1], positions[1].flip(0).sort().values])
    positions = positions.expand(2, 3, -1)
    with torch.no_grad():
        embeddings = torch.nn.functional.embedding(ids, decoder.words)
        ours = decoder.logits(decoder(embeddings, positions, torch.ones(2, 12, dtype=torch.bool)))
        hidden = reference.model.language_model(
            inputs_embeds=embeddings, position_ids=positions.transpose(0, 1), use_cache=False
        ).last_hidden_state
    assert torch.allclose(ours, reference.lm_head(hidden), atol=1e-4)


def test_the_label_loss_wants_the_labels_and_their_words(small_tower):
    trained = TrainedTower(small_tower, 4, torch.float32)
    labels = torch.tensor([[[2, 3, 0, 0], [0, 0, 0, 0]]])  # label 0 is padding
    words, which = torch.randn(3, 64), torch.tensor([[1, -1]])
    shown = torch.zeros(1, 2, small_tower.merger.block_width)
    tokens = torch.stack([words[1], torch.zeros(64)])[None]
    with torch.no_grad():
        trained.labels.weight.zero_()
        right, wrong = torch.tensor([-9.0, -9.0, 9.0, 9.0]), torch.full((4,), -9.0)
        trained.labels.weight[:, 0] = right
        trained.labels.bias.fill_(-9.0)
        shown[0, 0, 0] = 2.0
        assert trained.label_loss(Looked(tokens, shown), labels, words, which) < 1e-2
        assert trained.label_loss(Looked(tokens + 1, shown), labels, words, which) > 0.5
        nearer_another = 0.4 * words[1] + 0.6 * words[2]
        mixed = torch.stack([nearer_another, torch.zeros(64)])[None]
        assert trained.label_loss(Looked(mixed, shown), labels, words, which) > 2
        trained.labels.weight[:, 0] = wrong
        assert trained.label_loss(Looked(tokens, shown), labels, words, which) > 1


def give_adapter(decoder, seed):
    """Something to say."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith(".b"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def test_an_adapter_is_nothing_at_first_and_acts_only_behind_a_picture(checkpoint):
    plain, adapted = (Decoder(checkpoint, torch.float32) for _ in range(2))
    embeddings, positions = torch.randn(2, 5, 64), torch.arange(5).expand(1, 3, -1)
    behind = torch.tensor([[False, False, True, True, True], [False] * 5])
    assert torch.equal(plain(embeddings, positions, behind), adapted(embeddings, positions, ~behind))
    give_adapter(adapted, seed=2)
    before = plain(embeddings, positions, behind)
    after = adapted(embeddings, positions, behind)
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0, :2], after[0, :2])
    assert ((before[0, 2:] - after[0, 2:]).abs().amax(1) > 0.1).all()
    everywhere = adapted(embeddings, positions, torch.ones_like(behind))
    assert not torch.allclose(after[0, 2:], everywhere[0, 2:], atol=1e-2)


def test_an_adapter_is_what_adding_its_product_to_the_matrices_is(checkpoint, tmp_path):
    """Of the shipped form, in the checkpoint's names."""
    decoder = Decoder(checkpoint, torch.float32)
    give_adapter(decoder, seed=3)
    trained = {f"decoder.{name}": tensor.detach() for name, tensor in decoder.named_parameters()}
    write_shipped(tmp_path / "shipped.safetensors", shipped_tensors(trained))
    split = split_adapter(read_shipped(tmp_path / "shipped.safetensors"), decoder.shape.layers)
    reference = reference_model(checkpoint)
    blocks = {name: block for block, names in BLOCKS.items() for name in names}
    assert len(split) == 2 * len(blocks) * decoder.shape.layers
    with torch.no_grad():
        for layer in range(decoder.shape.layers):
            for name, block in blocks.items():
                a, b = (split[f"layers.{layer}.{name}.lora_{kind}.weight"] for kind in "AB")
                assert len(a) == b.shape[1] == RANKS[name]
                path = f"model.language_model.layers.{layer}.{block}.{name}.weight"
                reference.get_parameter(path).add_(b @ a)
        embeddings, positions = torch.randn(1, 6, 64), torch.arange(6).expand(1, 3, -1)
        ours = decoder(embeddings, positions, torch.ones(1, 6, dtype=torch.bool))
        expected = reference.model.language_model(
            inputs_embeds=embeddings, position_ids=positions.transpose(0, 1), use_cache=False
        ).last_hidden_state
        plain = Decoder(checkpoint, torch.float32)(embeddings, positions, torch.ones(1, 6, dtype=torch.bool))
    far = (plain - expected).norm()
    assert (ours - expected).norm() < 0.03 * far  # eight bits a weight


BLOCKS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def test_the_adapter_begins_with_the_first_picture(checkpoint, painter, small_tower):
    words, rng = Words(checkpoint), random.Random(6)
    decoder = Decoder(checkpoint, torch.float32)
    given = []
    decoder.register_forward_pre_hook(lambda _, arguments: given.append(arguments[2]))
    tower = TrainedTower(small_tower, len(LABELS), torch.float32)
    drawn = [painter.draw("things", 3, 3, rng) for _ in range(4)]
    rows = []
    for pair, text_first in ((drawn[:2], False), (drawn[2:], True)):
        row = Row(words, (3, 3))
        exchange = ask_about_two(*(picture.scene for picture in pair), rng)
        row.exchange(exchange, 2, text_first=text_first)
        rows.append(row)
    batch = pack(drawn, rows, words, 400)
    Seeing(tower, decoder, words.image, words.spoken()).answer(batch)
    for row, behind in zip(rows, given[0].tolist(), strict=True):
        first = row.ids.index(words.image)
        assert first > 2
        assert behind == [False] * first + [True] * (400 - first)


def test_rows_are_the_chat_template(checkpoint):
    words = Words(checkpoint)
    row = single(words, Exchange("colour", "What colour is it?", "It is red."), (2, 3))
    tokenizer = reference_tokenizer(checkpoint)
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What colour is it?"}]},
        {"role": "assistant", "content": "It is red."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert DEFAULT_SYSTEM in text
    expected = tokenizer.encode(text.replace("<|image_pad|>", "<|image_pad|>" * 6), add_special_tokens=False)
    assert row.ids == expected
    answered = [token for token, turn in zip(row.ids, row.answered, strict=True) if turn]
    assert tokenizer.decode(answered) == "It is red.<|im_end|>"


@pytest.mark.parametrize("text_first", [False, True])
def test_rows_of_two_pictures_are_the_chat_template(checkpoint, text_first):
    words = Words(checkpoint)
    row = Row(words, (2, 3))
    row.say((*words.opened("system"), *words.encode(DEFAULT_SYSTEM), *words.closed()))
    row.exchange(Exchange("two_pictures", "Which is red?", "The first."), 2, text_first=text_first)
    question = {"type": "text", "text": "Which is red?"}
    shown = [{"type": "image"}, {"type": "image"}]
    messages = [
        {"role": "user", "content": [question, *shown] if text_first else [*shown, question]},
        {"role": "assistant", "content": "The first."},
    ]
    tokenizer = reference_tokenizer(checkpoint)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "Picture 2: " in text
    expected = tokenizer.encode(text.replace("<|image_pad|>", "<|image_pad|>" * 6), add_special_tokens=False)
    assert row.ids == expected


def test_a_word_is_answered_letter_by_letter(checkpoint):
    words = Words(checkpoint)
    ids = words.answer(Exchange("word", "?", 'The word is "stone".', spelled="stone"))
    assert words.tokenizer.decode(list(ids)) == 'The word is "stone".'
    assert all(token in ids for letter in "stone" for token in words.encode(letter))


@pytest.mark.parametrize("pictures", [1, 2])
def test_conversations_fit_their_rows(checkpoint, painter, pictures):
    words, rng = Words(checkpoint), random.Random(5)
    for _ in range(20):
        drawn = [painter.draw(rng.choice(("things", "number")), 3, 3, rng) for _ in range(pictures)]
        row = talk(words, [picture.scene for picture in drawn], (3, 3), rng, length=600)
        assert len(row.ids) == len(row.answered) <= 600
        assert row.asked
        batch = pack(drawn, [row], words, 600)
        assert (batch.ids == words.image).sum() == 9 * pictures
        place = batch.targets[0] != IGNORED
        assert torch.equal(batch.targets[0][place], batch.ids[0].roll(-1)[place])
        assert set(batch.turns[0][place].tolist()) == set(range(1, len(row.asked) + 1))


def test_answers_are_true_of_the_scene():
    things = (Thing("red", "circle", 0.1, 0.1, place_of(0.1, 0.1)), Thing("blue", "star", 0.9, 0.5, "right"))
    scene, rng = Scene("things", "white", things), random.Random(0)
    answers = {(e.task, e.question): e.answer for e in (ask(scene, rng) for _ in range(3000))}
    assert answers["colour", "What colour is the circle?"] == "The circle is red."
    assert answers["shape", "Which shape is blue?"] == "The blue object is a star."
    assert answers["count", "How many objects are there?"] == "The number of objects is two."
    assert answers["count", "How many stars are there?"] == "The number of stars is one."
    assert answers["position", "Where is the circle?"] == "The circle is at the top left."
    for asked in ("left", "right"):
        question = f"Is the circle to the {asked} of the star?"
        assert answers["position", question] == "The circle is to the left of the star."
    assert answers["position", "Is the star above the circle?"] == "The star is below the circle."
    assert (
        answers["describe", "Describe this picture."] == "The picture shows one red circle and one blue star."
    )
    assert answers["unknown", "Where is the heart?"] == "I do not know. There is no heart."
    assert answers["background", "What colour is the background?"] == "The background is white."
    number = Scene("number", "white", text="47", text_colour="red")
    two = {e.question: e.answer for e in (ask_about_two(scene, number, rng) for _ in range(2000))}
    assert two["Which picture shows a number?"] == "The second picture."
    assert two["Tell me the color of the circle in the first picture."] == "The circle is red."
    assert two["How do the pictures differ?"].endswith("The second shows a number.")


def test_drawn_things_are_where_and_what_they_are_said_to_be(painter):
    rng = random.Random(1)
    seen = Counter()
    for _ in range(60):
        picture = painter.draw("things", 8, 8, rng)
        for thing in picture.scene.things:
            seen[thing.shape] += 1
            row, column = int(thing.y * 8), int(thing.x * 8)
            names = {LABELS[label] for label in picture.labels[row * 8 + column]}
            count = COUNTS[picture.scene.counted(thing.shape) - 1]
            assert {thing.colour, thing.shape, count, thing.place} <= names or thing.shape == "rectangle"
            if thing.shape in ("circle", "square", "heart", "diamond", "star", "cross"):
                pixel = picture.pixels[int(thing.y * 8 * CELL), int(thing.x * 8 * CELL)].astype(int)
                nearest = min(abs(pixel - anchor).max() for anchor in COLOURS[thing.colour])
                assert nearest <= 25, (thing, pixel)
    assert set(seen) == set(SHAPES)


def test_text_is_labelled_letter_by_letter(painter):
    picture = painter.draw("word", 8, 8, random.Random(2))
    letters = {LABELS[label] for label in picture.labels.flatten() if label}
    assert letters == set(picture.scene.text)
    assert picture.pixels.std() > 5


def said_by(picture, grid, words):
    """By cell, row by row: what its token is to say."""
    tokens = shown_tokens(picture, grid, words)
    return [words.tokenizer.decode([token]).strip() if token >= 0 else "" for token in tokens.tolist()]


def test_tokens_say_what_is_where_in_reading_order(painter, spoken_words):
    rng = random.Random(4)
    for _ in range(60):
        picture = painter.draw("things", 8, 8, rng)
        scene, said = picture.scene, said_by(picture, (8, 8), spoken_words)
        total = (*COUNTS, "six")[len(scene.things) - 1]
        expected = [scene.background, "background", total, "objects" if len(scene.things) > 1 else "object"]
        for thing in scene.things:
            expected += [COUNTS[scene.counted(thing.shape) - 1], thing.colour, thing.shape]
            expected += thing.place.split()
        assert [word for word in said if word] == expected
        assert said[:4] == expected[:4]
    alone = [p for p in (painter.draw("things", 8, 8, rng) for _ in range(60)) if len(p.scene.things) == 1]
    for picture in alone:
        thing = picture.scene.things[0]
        row = int(thing.y * 8)
        said = said_by(picture, (8, 8), spoken_words)[8 * row : 8 * row + 8]
        if row:
            column = min(said.index("one"), 7)
            assert column <= thing.x * 8


def test_a_words_letters_follow_each_other_though_cells_are_wider(painter, spoken_words):
    rng = random.Random(2)
    for grid in ((8, 8), (9, 7), (12, 6), (5, 14)):
        for _ in range(20):
            picture = painter.draw("word", *grid, rng)
            said = [word for word in said_by(picture, grid, spoken_words) if word]
            headline = [picture.scene.background, "background", picture.scene.text_colour, "word"]
            assert said == headline + list(picture.scene.text)


def test_letters_have_a_cell_each():
    assert letter_cells([1, 3, 4], row=2, columns=6) == [13, 15, 16]
    assert letter_cells([2, 2, 3, 3], row=0, columns=6) == [2, 3, 4, 5]
    assert letter_cells([3, 4, 4, 5, 5], row=1, columns=6) == [7, 8, 9, 10, 11]  # moved left
    assert letter_cells([0, 0, 1], row=1, columns=2) == [2, 3, 4]  # longer than a row


def test_phrases_make_room_for_each_other():
    def laid(*phrases):
        return lay_out(phrases, 12, 4).tolist()

    assert laid((5, (1, 2))) == [-1] * 5 + [1, 2] + [-1] * 5
    assert laid((7, (1, 2))) == [-1] * 6 + [1, 2] + [-1] * 4  # not over the end of its row
    assert laid((5, (3,)), (4, (1, 2))) == [-1] * 4 + [1, 2, 3] + [-1] * 5
    assert laid((10, (1, 2)), (10, (3, 4))) == [-1] * 8 + [1, 2, 3, 4]
    assert laid((0, tuple(range(20)))) == list(range(12))


@pytest.fixture(scope="module")
def spoken_words():
    return SpokenWords()


class SpokenWords:
    """A vocabulary of whole words, for what tokens say."""

    def __init__(self):
        self.names = []
        self.tokenizer = self

    def phrase(self, label):
        return tuple(self._id(word) for word in label.split())

    def _id(self, word):
        if word not in self.names:
            self.names.append(word)
        return self.names.index(word)

    def decode(self, ids):
        return self.names[ids[0]]


def test_labels_have_names():
    assert len(LABELS) == 1 + len(COLOURS) + len(SHAPES) + 5 + 9 + 52 + 10 + len(emoji_list())
    assert LABELS[LABEL_OF["heart"]] == "heart"
    assert len(emoji_list()) == len({emoji.name for emoji in emoji_list()}) == 200


def test_shapes_differ():
    masks = [np.asarray(shape_mask(shape, VARIANTS // 2)) for shape in SHAPES if shape != "rectangle"]
    for index, mask in enumerate(masks):
        assert all(np.abs(mask.astype(int) - other).mean() > 8 for other in masks[:index])


def test_evaluation_is_held_out(checkpoint, tmp_path):
    words = tuple(
        sorted({f"{a}{b}" for a in ("sto", "riv", "clo", "tab") for b in ("ne", "er", "ud", "le", "ring")})
    )
    train, other = split_words(words, "train"), split_words(words, "held_out")
    assert train
    assert other
    assert not set(train) & set(other)
    sprites, rng = Sprites(tmp_path), random.Random(3)
    drawn = {
        split: [Painter(sprites, words, split).draw(kind, 4, 4, rng).scene for _ in range(60)]
        for split, kind in (("train", "number"), ("held_out", "word"))
    }
    assert not any(held_out(scene.text) for scene in drawn["train"] if len(scene.text) > 1)
    assert all(held_out(scene.text.lower()) for scene in drawn["held_out"])
    pairs = {
        (t.colour, t.shape)
        for _ in range(80)
        for t in Painter(sprites, words, "train").draw("things", 4, 4, rng).scene.things
    }
    assert not any(held_out_pair(*pair) for pair in pairs)


def test_dictionary_is_whole_words(checkpoint):
    assert all(3 <= len(word) <= 8 and word.islower() for word in dictionary(Words(checkpoint).tokenizer))
    assert dictionary(Words(checkpoint).tokenizer) == ("the",)  # bytes, and one word


def test_a_run_learns_saves_and_is_taken_up(checkpoint, painter, small_tower, tmp_path):
    torch.manual_seed(0)
    words, rng = Words(checkpoint), random.Random(5)

    def model():
        decoder = Decoder(checkpoint, torch.float32)
        tower = TrainedTower(new_tower(small_tower.config, decoder.words, 1), len(LABELS), torch.float32)
        return Seeing(tower, decoder, words.image, words.spoken())

    drawn = [painter.draw("things", 3, 3, rng) for _ in range(2)]
    batch = pack(drawn, [talk(words, [picture.scene], (3, 3), rng, 400) for picture in drawn], words, 400)
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        seen = trained.answer(batch)
        assert seen.answer_loss is not None
        loss = seen.answer_loss + seen.label_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert seen.asked.sum() == (batch.tasks >= 0).sum()
    checkpoints.save(trained, checkpoints.Progress(steps=12), tmp_path)
    other = model()
    assert checkpoints.restore(other, tmp_path).steps == 12
    with torch.no_grad():
        assert abs(other.look(batch).label_loss - trained.look(batch).label_loss) < 0.005
        assert abs(other.answer(batch).answer_loss - trained.answer(batch).answer_loss) < 0.005
        assert all(one.abs().max() > 0.01 for one in other.decoder.parameters())
    tensors = shipped_tensors(checkpoints.read_trained(tmp_path))
    assert {name.partition(".")[0] for name in tensors} == {"visual", "adapter"}
    write_shipped(tmp_path / "shipped.safetensors", tensors)
    shipped = read_shipped(tmp_path / "shipped.safetensors")
    assert set(shipped) == set(tensors)
    assert all((shipped[n] - tensors[n]).abs().max() <= 0.01 * tensors[n].abs().max() for n in tensors)


def test_the_exported_tower_is_the_composed_checkpoints(tmp_path, checkpoint):
    """What training ran is what a checkpoint with the shipped weights computes, but for their eight bits."""
    text = json.loads((checkpoint / "config.json").read_text())["text_config"]
    llama = LlamaForCausalLM(llama_config(text["hidden_size"])).float().eval()
    randomise(llama, seed=3, num_live_rows=287)
    tower = new_tower(replace_config(), llama.model.embed_tokens.weight, seed=0)
    exported = tower_tensors({f"tower.tower.{n}": t.detach() for n, t in tower.named_parameters()})
    write_shipped(tmp_path / "seeing.safetensors", exported)
    shipped = read_shipped(tmp_path / "seeing.safetensors")
    compose.compose(llama, build_tokenizer(), tmp_path / "made", shipped)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 224, 252, 3), dtype=np.uint8))
    with torch.no_grad():
        ours = TrainedTower(tower, 3, torch.float32)(pixels, torch.zeros(1))[0]
        flat = patches(pixels, torch.zeros(1), tower.config)[0]
        visual = reference_model(tmp_path / "made").model.visual
        theirs = visual(flat, grid_thw=torch.tensor([[1, 16, 18]])).pooler_output
    theirs = theirs[0] if theirs.dim() == 3 else theirs
    assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.97


def test_a_read_word_may_occur_elsewhere_in_its_answer(checkpoint):
    words = Words(checkpoint)
    for word in ("word", "The", "is", "t"):
        answer = f'The word is "{word}".'
        ids = words.answer(Exchange("word", "?", answer, spelled=word))
        assert words.tokenizer.decode(list(ids)) == answer


def test_shipped_tensors_fit_the_composed_model():
    """The names and shapes that training exports are those that `compose` wants."""
    tower = new_tower(CONFIG, torch.randn(20, 576), seed=0)
    trained = {f"tower.tower.{name}": tensor for name, tensor in tower.named_parameters()}
    tensors = tower_tensors({name: tensor.detach() for name, tensor in trained.items()})
    from transformers import Qwen2_5_VLForConditionalGeneration

    llama = LlamaConfig(
        vocab_size=287,
        hidden_size=576,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1234.0},
    )
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(
            compose._config(llama, build_tokenizer_with_vision(), compose.TRAINED_TOWER)
        )
    wanted = {n.removeprefix("model."): t.shape for n, t in model.state_dict().items() if ".visual." in n}
    assert {name: tensor.shape for name, tensor in tensors.items()} == wanted


def build_tokenizer_with_vision():
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": list(compose.VISION_TOKENS)})
    return tokenizer


def test_talk_of_else_follows_a_picture_and_is_held_out(checkpoint, painter):
    train, held = plain_talk("train"), plain_talk("held_out")
    assert len(train) > 4 * len(held) > 0
    assert not set(train) & set(held)
    words, rng = Words(checkpoint), random.Random(1)
    picture = painter.draw("things", 3, 3, rng)
    rows = [talk(words, [picture.scene], (3, 3), rng, 2000) for _ in range(60)]
    turned = [row for row in rows if "talk" in row.asked]
    assert 0 < len(turned) < 20
    assert all(row.asked[0] != "talk" for row in turned)
    about, other = ask(picture.scene, rng), Exchange("talk", *held[0])
    row = single(words, other, (3, 3), after=about)
    assert row.asked == ["talk"]
    answered = [token for token, turn in zip(row.ids, row.answered, strict=True) if turn]
    assert tuple(answered) == (*words.answer(other), words.end)
    assert row.ids.count(words.image) == 9


def test_what_else_is_on_a_side_makes_a_question_of_it_ambiguous():
    corner = (Thing("red", "circle", 0.1, 0.1, "top left"), Thing("blue", "star", 0.1, 0.5, "left"))
    rng = random.Random(0)
    asked = {ask_task(Scene("things", "white", corner), "position", rng).question for _ in range(300)}
    assert not {"What is at the left?", "What is on the left?"} & asked
    assert "What is at the top left?" in asked


def test_batches_repeat(checkpoint, tmp_path):
    config = DataConfig(checkpoint, tmp_path, batch=2, seed=7, length=1200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.seeing.batches.dictionary", lambda _: WORDS)
        first, again = (next(iter(Training(config))) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        other = next(iter(Training(replace(config, seed=8))))
        assert not torch.equal(first.ids, other.ids)
        held = list(HeldOut(config, rows=1))
    assert isinstance(held[0], Batch)
    named = [ASKED[int(batch.tasks[0, 0])].partition(".")[0] for batch in held]
    assert named == [task for task in TASKS if task != "emoji"]  # there is no emoji font


def test_a_run_goes_on_from_one_that_had_no_adapter(checkpoint, small_tower, tmp_path):
    words = Words(checkpoint)
    decoder, tower = Decoder(checkpoint, torch.float32), TrainedTower(small_tower, 3, torch.float32)
    before = torch.nn.ModuleDict({"tower": tower})
    checkpoints.save(before, checkpoints.Progress(steps=3, scheme=checkpoints.SCHEME), tmp_path)
    tensors = checkpoints.read_trained(tmp_path)
    assert {name.partition(".")[0] for name in shipped_tensors(tensors)} == {"visual"}
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.zero_()
    model = Seeing(tower, decoder, words.image, words.spoken())
    assert checkpoints.restore(model, tmp_path).steps == 3
    assert torch.equal(tower.labels.bias, torch.full((3,), -4.0))
    assert all(one.any() != name.endswith(".b") for name, one in decoder.named_parameters())


def test_words_without_a_picture_are_many_and_different():
    asked = questions()
    assert len(asked) == len(set(asked)) > 400
    assert not any("{" in question or "  " in question for question in asked)
    assert {"What is the capital of France?", "Name a bird.", "Is the earth round?"} <= set(asked)


def test_words_are_answered_at_once_as_alone_by_a_tokenizer_without_padding(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    asked = [
        "Hi.",
        "What is the opposite of hot?",
        "Tell me a short story.",
        "Tell me all that there is to know.",
    ]
    alone = [said for question in asked for said in answer_all(tmp_path, [question])]
    assert [said.question for said in alone] == asked[1:3]  # the others' answers have no end
    assert answer_all(tmp_path, asked) == alone
