"""The faults of `planted_faults`: mistakes that change results without an error."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A text of the package, which must be there exactly once, the one that replaces it, and tests of which one must
    fail then: those of a file that `pytest` runs, or single tests, whatever their marks."""

    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = {
    "causal mask without the query's own position": Fault(
        "return query_T1 >= key_1S", "return query_T1 > key_1S", ("tests/ops/test_masks.py",)
    ),
    "window one position too long": Fault(
        "jnp.abs(query_T1 - key_1S) < width", "jnp.abs(query_T1 - key_1S) <= width", ("tests/ops/test_masks.py",)
    ),
    "packed documents see each other": Fault(
        "return self.causal.array(T, S) & segment(self.segments_T, self.segments_T)",
        "return self.causal.array(T, S)",
        ("tests/ops/test_masks.py",),
    ),
    "scores without 1/√K": Fault(
        "return K**-0.5 if scale is None else scale",
        "return 1.0 if scale is None else scale",
        ("tests/ops/test_attention.py",),
    ),
    "query heads grouped in another order": Fault(
        "q_GRTK = q_HTK.reshape(G, H // G, T, K) * scale",
        "q_GRTK = q_HTK.reshape(H // G, G, T, K).swapaxes(0, 1) * scale",
        ("tests/ops/test_attention.py",),
    ),
    "RoPE rotates the other way": Fault(
        "jnp.concatenate([-sin, sin], axis=-1)",
        "jnp.concatenate([sin, -sin], axis=-1)",
        ("tests/ops/test_positions.py",),
    ),
    "positions written one slot late": Fault(
        "update_slice(position_S, positions_T.astype(position_S.dtype), slot, 0)",
        "update_slice(position_S, positions_T.astype(position_S.dtype), slot + 1, 0)",
        ("tests/ops/test_cache.py", "tests/models/test_decoder.py"),
    ),
    "pre-norm applied for post-norm": Fault(
        'return x_TD if self.norm_placement == "post" else', "return", ("tests/nn/test_block.py",)
    ),
    "residual connection dropped": Fault("return x_TD + y_TD", "return y_TD", ("tests/nn/test_block.py",)),
    "one dropout key for all sublayers": Fault(
        "list(jax.random.split(key, 3 if crosses else 2))", "[key] * 3", ("tests/nn/test_block.py",)
    ),
    "dropout without a key": Fault(
        "if self.dropout and key is not None:",
        "if self.dropout:\n            key = jax.random.key(0) if key is None else key",
        ("tests/nn/test_block.py", "tests/models/test_decoder.py"),
    ),
    "no gradient through tied weights": Fault(
        'self.embedding.W_E.T if c.unembedding == "tied"',
        'jax.lax.stop_gradient(self.embedding.W_E).T if c.unembedding == "tied"',
        ("tests/models/test_decoder.py",),
    ),
    "targets are the inputs": Fault(
        "windows_BT[:, 1:][:, -n_predicted:]",
        "windows_BT[:, :-1][:, -n_predicted:]",
        ("tests/data/test_windows.py",),
    ),
    "loss over padding": Fault(
        "targets_N, jnp.reshape(weights_B, -1), _max_logits(x_ND), smoothing",
        "targets_N, jnp.full(targets_N.shape, jnp.sum(weights_B) / targets_N.size), _max_logits(x_ND), smoothing",
        ("tests/train/test_step.py::test_gradients_are_the_same_on_a_mesh_and_in_microbatches",),
    ),
    "microbatches are summed instead of averaged": Fault(
        "1 / (targets_B.size * across.n)",
        "1 / targets_B.size",
        ("tests/models/test_objective.py::test_losses_of_microbatches_sum_to_the_loss_of_the_batch",),
    ),
    "gradients of sharded parameters summed twice": Fault(
        "sum_over_batch(grads, specs.params)",
        "sum_over_batch(grads)",
        ("tests/train/test_step.py::test_training_is_the_same_on_a_mesh_of_every_axis",),
    ),
    "updates clipped instead of gradients": Fault(
        "clipped = jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm) * limit), grads)\n"
        "        return rule.update(clipped, state, params)",
        "updates, state = rule.update(grads, state, params)\n"
        "        return jax.tree.map(lambda g: jnp.where(norm < limit, g, (g / norm) * limit), updates), state",
        ("tests/train/test_optimizer.py",),
    ),
    "schedule one step late": Fault(
        "return optax.join_schedules(parts, joints)",
        "return lambda count: optax.join_schedules(parts, joints)(jnp.maximum(count - 1, 0))",
        ("tests/train/test_optimizer.py",),
    ),
    "weight decay of gains and biases": Fault(
        "axes[_name(path)].role in (Role.MATRIX, Role.EMBEDDING)", "True", ("tests/train/test_optimizer.py",)
    ),
    "top-k keeps one more": Fault(
        "min(k, logits_V.shape[-1])", "min(k + 1, logits_V.shape[-1])", ("tests/decode/test_samplers.py",)
    ),
    "decoding overwrites the ring one slot early": Fault(
        "slot=(slot + i) % n_slots",
        "slot=(slot + i) % (n_slots - 1)",
        ("tests/decode/test_generation.py::test_a_ring_with_no_more_slots_than_the_window_holds_all_of_it",),
    ),
    "positions of prompts count their padding": Fault(
        "positions_BT[i, longest - len(prompt) : longest] = np.arange(len(prompt))",
        "positions_BT[i, longest - len(prompt) : longest] = np.arange(longest - len(prompt), longest)",
        ("tests/decode/test_generation.py::test_positions_of_a_row_do_not_count_its_padding",),
    ),
    "rejected proposals replaced by the model's own distribution": Fault(
        "rest_V = jnp.maximum(p_V - q_V, 0)",
        "rest_V = p_V",
        ("tests/decode/test_speculative.py::test_a_token_that_is_proposed_is_no_likelier",),
    ),
    "int8 keys scaled as the values": Fault(
        "scores_GRS *= stored.scale_GS[:, None, :]",
        "scores_GRS *= layer.v_GSK.scale_GS[:, None, :]",
        ("tests/ops/test_cache.py",),
    ),
    "checksums leave out a checkpoint's shards": Fault(
        'for p in item.rglob("*") if p.is_file()',
        'for p in item.glob("*") if p.is_file()',
        ("tests/runs/test_checkpoints.py::test_every_flipped_bit_is_detected",),
    ),
    "worst checkpoint preserved as the best": Fault(
        'score = lambda metrics: -metrics["val_loss"]',
        'score = lambda metrics: metrics["val_loss"]',
        ("tests/runs/test_checkpoints.py::test_last_two_and_best_checkpoints_are_preserved",),
    ),
    "resumed run repeats a batch": Fault(
        "local_rows(split, t.batch_size), start.step + t.skip_batches",
        "local_rows(split, t.batch_size), max(0, start.step - 1) + t.skip_batches",
        ("tests/train/test_loop.py::test_each_step_reads_its_own_batch_on_resuming_too",),
    ),
    "every epoch shuffled alike": Fault(
        "Philox(key=[seed, epoch])).shuffle(indices)",
        "Philox(key=[seed, 0])).shuffle(indices)",
        ("tests/data/test_dataset.py", "tests/data/test_windows.py"),
    ),
    "end of packed documents is no target": Fault(
        "starts, lengths = starts[:-1], np.diff(starts)",
        "starts, lengths = starts[:-1], np.diff(starts) - 1",
        ("tests/data/test_packing.py",),
    ),
    "held-out documents are trained on": Fault(
        'train = documents[~np.isin(documents.rows_N["digest"], val.rows_N["digest"])]',
        "train = documents",
        ("tests/data/test_tokens.py",),
    ),
    "only tokens shown as the mask are predicted": Fault(
        "return masked_BT, draws_BT < fraction",
        "return masked_BT, masked_BT == mask_token",
        ("tests/data/test_masked.py",),
    ),
    "gradients of experts summed twice over their axis": Fault(
        "axes = [axis for axis in BATCH if axis not in spec]",
        'axes = [axis for axis in BATCH if axis != "fsdp" or axis not in spec]',
        ("tests/train/test_step.py::test_gradients_are_the_same_on_a_mesh_and_in_microbatches",),
    ),
    "devices of a process share their first rows": Fault(
        "shard = lambda index: leaf[np.searchsorted(row_indices, np.arange(n_rows)[index[0]])]",
        "shard = lambda index: leaf[: len(range(n_rows)[index[0]])]",
        ("tests/parallel/test_mesh.py::test_batch_is_assembled_from_the_rows_of_one_process",),
    ),
    "devices share their dropout keys": Fault(
        "(key, jnp.arange(B))",
        "(key, jnp.arange(B) % (B // batch_shards(self.mesh)))",
        ("tests/train/test_step.py::test_gradients_are_the_same_on_a_mesh_and_in_microbatches",),
    ),
    "imported output projection not transposed": Fault(
        '"model.layers.{i}.self_attn.o_proj.weight", "D (H K) -> H K D"',
        '"model.layers.{i}.self_attn.o_proj.weight", "(H K) D -> H K D"',
        ("tests/interop/test_import.py::test_logits_of_an_imported_llama_equal_those_by_numpy",),
    ),
    "epsilon of imported norms lost": Fault(
        'Field("norm_eps", "rms_norm_eps", 1e-6)',
        'Field("norm_eps", "rms_norm_epsilon", 1e-6)',
        (
            "tests/interop/test_huggingface.py::test_config_names_what_other_libraries_read",
            "tests/interop/test_import.py::test_matrices_are_transposed_and_heads_are_parted",
        ),
    ),
    "keys of a GGUF file rotated in halves instead of pairs": Fault(
        '"(G Z A) D -> D G (A Z)"',
        '"(G A Z) D -> D G (A Z)"',
        ("tests/interop/test_gguf.py::test_numpy_forward_of_the_file_gives_the_logits",),
    ),
    "influence attributed to the document of the input": Fault(
        "next_token_batch(self._document_of.batch(read), self._model.n_predicted).targets",
        "next_token_batch(self._document_of.batch(read), self._model.n_predicted).inputs[0]",
        ("tests/inspect/test_influence_data.py",),
    ),
    "all heads but one ablated": Fault(
        "scales_H[layer] = 1 - jnp.eye(H)",
        "scales_H[layer] = jnp.eye(H)",
        ("tests/inspect/test_heads.py::test_zero_ablation_equals_zero_output_weights",),
    ),
    "logit lens without the final norm": Fault(
        '(model.apply, {"params": params}, method="unembed")\n'
        "    return OrderedDict((name, unembed(x_TD)) for name, x_TD in stream.items())",
        '(model.apply, {"params": params}, method=lambda model, x_TD: model.unembedding().logits(x_TD))\n'
        "    return OrderedDict((name, unembed(x_TD)) for name, x_TD in stream.items())",
        ("tests/inspect/test_residual_stream.py::test_logit_lens_ends_with_the_models_logits",),
    ),
}
