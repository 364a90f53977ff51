"""What tests of several rewards need."""

import pytest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {% for c in m['content'] %}{% if c['type'] == 'text' %}"
    "{{ c['text'] }}{% else %}<|vision_start|><|{{ c['type'] }}_pad|><|vision_end|>{% endif %}{% endfor %}<|im_end|> "
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@pytest.fixture(scope="session")
def qwen_base():
    """``qwen_base(folder)`` puts configuration, tokeniser and processor of a Qwen2-VL of 32 features into a folder, and
    gives (configuration, size of the vocabulary)."""

    def made(folder):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLProcessor, Qwen2VLVideoProcessor
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

        special = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|image_pad|>"]
        plainly = "user assistant rate how it looks moves fits end a red blue ball cube".split()
        words = ["[UNK]", "[PAD]", *special, *plainly]
        tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")
        fast.add_tokens(special, special_tokens=True)
        parts = Qwen2VLImageProcessor(), fast, Qwen2VLVideoProcessor()
        Qwen2VLProcessor(*parts, chat_template=TEMPLATE).save_pretrained(folder)
        at = fast.convert_tokens_to_ids
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
        text = dict(vocab_size=len(fast), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    num_attention_heads=2, num_key_value_heads=1, rope_parameters=rope,
                    max_position_embeddings=4096)  # fmt: skip
        vision = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2)
        config = Qwen2VLConfig(
            text_config=text, vision_config=vision, image_token_id=at("<|image_pad|>"),
            video_token_id=at("<|video_pad|>"), vision_start_token_id=at("<|vision_start|>"),
            vision_end_token_id=at("<|vision_end|>"),
        )  # fmt: skip
        config.save_pretrained(folder)
        return config, len(fast)

    return made
