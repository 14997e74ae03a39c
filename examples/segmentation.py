"""Train a segmentation model: logits (N, C, H, W), whose classes are not the last dimension.

    python examples/segmentation.py

`cross_entropy` and `softmax` read such logits where they lie. Nothing is permuted or copied.
"""

import torch

import fused_softmax as fs

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
N, CLASSES, HEIGHT, WIDTH, IGNORED = 2, 7, 16, 20, 255

model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, CLASSES, 1)).to(
    device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
images = torch.randn(N, 3, HEIGHT, WIDTH, device=device)
labels = (images[:, 0] > 0).long() + 2 * (images[:, 1] > 0).long()  # (N, H, W)
labels[:, :2] = IGNORED  # pixels without a label

for step in range(5):
    logits = model(images)
    loss = fs.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=0.05)
    want = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=0.05)
    torch.testing.assert_close(loss, want)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {float(loss.detach()):.4f}")

with torch.no_grad():
    probabilities = fs.softmax(model(images), dim=1)
torch.testing.assert_close(probabilities.sum(1), torch.ones(N, HEIGHT, WIDTH, device=device))
counted = labels != IGNORED
print(f"accuracy {float((probabilities.argmax(1) == labels)[counted].float().mean()):.3f}")
