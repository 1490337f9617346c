"""What a run shows in TensorBoard, and how fast it says it goes."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datamodules import ImageDataModule, TextDataModule
from zoo.callbacks import MetricPictures, TextSamples, TokensPerSecond
from zoo.errors import ZooError
from zoo.tasks import ImageClassificationTask, LanguageModelTask


@pytest.fixture(scope="module")
def events(corpus, shared_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    pl.seed_everything(0)
    data = TextDataModule(path=str(corpus), vocab_size=300, window=16, batch_size=4, cache_dir=str(shared_cache))
    task = LanguageModelTask(d_model=16, n_heads=2, d_ff=32, n_layers=2, mlp_hidden=[8], share_mlp=False)
    trainer = pl.Trainer(
        max_steps=8,
        val_check_interval=4,
        limit_val_batches=1,
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=TensorBoardLogger(folder),
        callbacks=[TextSamples(["def ", ""], 10), MetricPictures(), TokensPerSecond()],
    )
    trainer.fit(task, data)
    accumulator = EventAccumulator(trainer.logger.log_dir)
    accumulator.Reload()
    return accumulator


def test_a_sample_of_each_prompt_is_in_the_text_tab_at_each_validation(events):
    for i, prompt in enumerate(("def ", "")):
        samples = events.Tensors(f"sample/{i}/text_summary")
        assert [sample.step for sample in samples] == [4, 8]
        assert samples[0].tensor_proto.string_val[0].decode().startswith(f"    {prompt}")
        assert len(samples[0].tensor_proto.string_val[0]) > len(f"    {prompt}")


@pytest.fixture(scope="module")
def digits_run():
    task = ImageClassificationTask(name="test_resnet")
    return task, ImageDataModule(source="digits", image_size=32, channels=3)


def test_what_attention_does_is_drawn_once_for_all_layers_at_each_validation(events):
    for name in ("maps", "M", "head_metrics"):
        drawn = events.Images(f"attention/{name}")
        assert [picture.step for picture in drawn] == [4, 8]
        assert min(drawn[0].width, drawn[0].height) > 150


def test_network_without_attention_is_refused_as_validation_begins(digits_run):
    task, data = digits_run
    trainer = pl.Trainer(max_steps=1, logger=False, enable_progress_bar=False, callbacks=[MetricPictures()])
    with pytest.raises(ZooError, match="ImageClassificationTask around ResNet, which has no attention to draw"):
        trainer.validate(task, data, verbose=False)


def test_throughput_is_logged_as_tokens_a_second(events):
    values = [event.value for event in events.Scalars("tokens_per_second")]
    assert len(values) == 4
    assert all(value > 4 * 16 for value in values), "a step of 64 tokens takes well below a second"


def test_throughput_counts_the_tokens_of_its_steps(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 14.0])
    monkeypatch.setattr("zoo.callbacks.throughput.time.perf_counter", lambda: next(clock))
    logged = []

    class Module:
        def log(self, name, value, prog_bar):
            logged.append(value)

    class Trainer:
        world_size = 3

    callback = TokensPerSecond()
    for _ in range(2):
        callback.on_train_batch_start(Trainer(), Module(), None, 0)
        callback.on_train_batch_end(Trainer(), Module(), None, torch.zeros(4, 11), 0)
    assert logged == [3 * 4 * 10 / 2.0, 2 * 3 * 4 * 10 / 6.0]
