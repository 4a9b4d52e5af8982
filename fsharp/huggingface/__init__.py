"""Hugging Face's accelerate and Trainer for sharded modules. Importing a module of this folder imports its package."""
