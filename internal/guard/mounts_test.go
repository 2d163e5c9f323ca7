package guard

import (
	"path"
	"regexp"
	"strings"
	"testing"

	apps "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"

	"github.com/serviceplane/serviceplane/internal/apitest"
	"github.com/serviceplane/serviceplane/internal/guard/documents"
)

var copied = regexp.MustCompile(`(?m)^COPY --from=\S+ \S+ (/\S+)$`) // read-only

// TestMountsLeaveTheImagesFiles: in no manifest, a volume is mounted at a file of the container's
// image, where the container could not start, or above one, which it would hide.
func TestMountsLeaveTheImagesFiles(t *testing.T) {
	images, seen := map[string][][]string{}, map[string]bool{} // by name: what its Dockerfile copies into it
	for name, text := range documents.Read(t, root, "/Dockerfile") {
		image := "REGISTRY/" + path.Base(strings.TrimSuffix(path.Dir(name), "/deploy"))
		if images[image] = copied.FindAllStringSubmatch(text, -1); images[image] == nil {
			t.Errorf("%s copies nothing into the image", name)
		}
	}
	for manifest := range documents.Read(t, root, ".yaml") {
		if strings.HasPrefix(manifest, "examples/quickstart/cluster/") {
			continue // has no containers
		}
		for _, object := range apitest.ReadManifest(t, path.Join(root, manifest)) {
			for _, container := range containersOf(object) {
				image, _, _ := strings.Cut(container.Image, ":")
				seen[image] = true
				for _, mount := range container.VolumeMounts {
					for _, file := range images[image] {
						if within(file[1], strings.TrimSuffix(mount.MountPath, "/")) {
							t.Errorf("%s: container %s mounts %s at %s, where its image has %s", manifest, container.Name, mount.Name, mount.MountPath, file[1])
						}
					}
				}
			}
		}
	}
	for image := range images {
		if !seen[image] {
			t.Errorf("no manifest has the image %s", image)
		}
	}
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
