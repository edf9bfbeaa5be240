"""Publish the model of a finished run: ``python recipes/export.py checkpoint=best.ckpt out=FOLDER [overrides]``.

The checkpoint carries the configuration of its run; overrides change it, such as ``data.root=/elsewhere``.
"""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig
from recipe_tools.build import Config, build_datamodule, build_task, plain
from recipe_tools.config_types import check_complete
from recipe_tools.overrides import explained_overrides
from recipe_tools.quiet import be_quiet
from recipe_tools.trained import load_checkpoint, offer_checkpoint_config

from lightning_recsys.checkpoints import is_folder, read_checkpoint
from lightning_recsys.embeddings import TableBackend
from lightning_recsys.runtime import configure_worker

try:
    from lightning_recsys.serving import Manifest, export_model
except ModuleNotFoundError as error:
    raise SystemExit(str(error)) from None


@hydra.main(version_base="1.3", config_path="../conf", config_name="export")
def main(cfg: DictConfig) -> None:
    be_quiet()
    check_complete(cfg)
    configure_worker()
    config = plain(cfg)
    manifest = export(config)
    print(f"published version {manifest.version} in {config['out']}")


def export(config: Config) -> Manifest:
    """Publish the model as a base."""
    path = config["checkpoint"]
    checkpoint = load_checkpoint(path, "checkpoint")
    datamodule = build_datamodule(config, checkpoint=checkpoint)
    task = build_task(config, datamodule)
    if any(isinstance(module, TableBackend) and module.is_meta for module in task.modules()):
        raise ValueError(
            "checkpoint: its tables were made with embeddings.device=meta, and rows of such are in stores while a run"
            " trains: let the run publish, with 'callbacks=[default,model_publisher]'."
        )
    task.load_state_dict((read_checkpoint(path) if is_folder(path) else checkpoint)["state_dict"])
    position = {"epoch": checkpoint.get("epoch"), "global_step": checkpoint.get("global_step")}
    return export_model(
        task.model,
        config["out"],
        num_dense=datamodule.num_dense,
        datamodule=datamodule,
        position=position,
        keep_runs=config["keep_runs"],
        rows=config["rows"],
    )


if __name__ == "__main__":
    offer_checkpoint_config(sys.argv[1:], recipe="export", key="checkpoint")
    with explained_overrides("export"):
        main()
