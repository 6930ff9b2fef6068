"""What measures a pattern's loss: a made-up landscape, transformers, or a running SGLang."""
