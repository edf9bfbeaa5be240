"""A model and a LightningModule of your own."""
