package guard

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/apitest"
)

// TestMountsLeaveTheImagesFiles: in no manifest, a volume is mounted at a file of the container's
// image, where the container could not start, or above one, which it would hide.
func TestMountsLeaveTheImagesFiles(t *testing.T) {
	images := imagesOf(t)
	seen := map[string]bool{}
	for _, path := range manifests(t) {
		for _, object := range apitest.ReadManifest(t, path) {
			for _, container := range containersOf(object) {
				name, ours := strings.CutPrefix(container.Image, "REGISTRY/")
				name, _, _ = strings.Cut(name, ":")
				files := images[name]
				if !ours || files == nil {
					continue
				}
				seen[name] = true
				for _, mount := range container.VolumeMounts {
					for _, file := range files {
						if mount.MountPath == file || strings.HasPrefix(file, strings.TrimSuffix(mount.MountPath, "/")+"/") {
							t.Errorf("%s: container %s mounts %s at %s, where its image has %s", path, container.Name, mount.Name, mount.MountPath, file)
						}
					}
				}
			}
		}
	}
	for name := range images {
		if !seen[name] {
			t.Errorf("no manifest has the image of %s", name)
		}
	}
}

// imagesOf returns the files in the image of each example, as its Dockerfile copies them.
func imagesOf(t *testing.T) map[string][]string {
	t.Helper()
	copies := regexp.MustCompile(`(?m)^COPY --from=\S+ \S+ (/\S+)$`)
	images := map[string][]string{}
	for _, pattern := range []string{"../../examples/*/Dockerfile", "../../nodeproxy/deploy/Dockerfile"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			name := filepath.Base(strings.TrimSuffix(filepath.Dir(path), "/deploy"))
			for _, match := range copies.FindAllStringSubmatch(string(text), -1) {
				images[name] = append(images[name], match[1])
			}
			if images[name] == nil {
				t.Errorf("%s copies nothing into the image", path)
			}
		}
	}
	return images
}

func manifests(t *testing.T) (paths []string) {
	t.Helper()
	for _, pattern := range []string{"../../examples/*/*.yaml", "../../nodeproxy/deploy/*.yaml"} {
		more, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, more...)
	}
	return paths
}

func containersOf(object any) []v1.Container {
	var pod v1.PodSpec
	switch o := object.(type) {
	case *apps.Deployment:
		pod = o.Spec.Template.Spec
	case *apps.DaemonSet:
		pod = o.Spec.Template.Spec
	case *v1.Pod:
		pod = o.Spec
	}
	return append(pod.InitContainers, pod.Containers...)
}
