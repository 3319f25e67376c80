"""Splitting, padding and joining of one call's rows: no processes."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from toy_worker import Toy

from megatron_rl.controller.routing import chunk_sizes, is_record, join_answers, route_call, split_call
from megatron_rl.dispatch import Coordinates, Dispatch
from megatron_rl.records import ActorBatch, Prompts, non_tensor, ragged
