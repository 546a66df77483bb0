"""What answers of OpenAI's protocols hold."""

from sgl_ext.compat.openai_answers import text_metadata


def test_metadata_holds_texts_only() -> None:
    versions = {"weight_version": "default", "weight_versions": [["default", 0, 7]]}
    assert text_metadata(lambda _: versions, None) == {"weight_version": "default"}
