package manifest

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	strict "sigs.k8s.io/json"
)

const mixed = `# A comment.
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec:
  clusterIP: 10.96.0.1
  ports: [{port: 80, targetPort: 8080}]
---
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: web-1, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints:
- addresses: [10.244.0.1]
---
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Node
  metadata: {name: node-1}
- {apiVersion: v1, kind: Service, metadata: {name: none}}
`

// places lists the objects of a file as "kind namespace/name line".
func places(t *testing.T, objects []Object) []string {
	t.Helper()
	var got []string
	for _, o := range objects {
		kind := o.Value.GetObjectKind().GroupVersionKind().Kind
		got = append(got, strings.TrimSpace(kind+" "+o.Value.GetNamespace()+"/"+o.Value.GetName()+" "+string(rune('0'+o.Line/10))+string(rune('0'+o.Line%10))))
	}
	return got
}

func TestObjectsComeWithTheirLines(t *testing.T) {
	tabbed := "{\n\t\"apiVersion\": \"v1\",\n\t\"kind\": \"List\",\n\t\"items\": [\n\t\t{\"apiVersion\":\"v1\",\"kind\":\"Node\",\"metadata\":{\"name\":\"a\"}},\n" +
		"\t\t{\n\t\t\t\"apiVersion\": \"v1\",\n\t\t\t\"kind\": \"Service\", \"metadata\": {\"name\": \"b\\/\\ud83d\\ude00\"}\n\t\t}\n\t]\n}\n"
	anchors := "apiVersion: v1\nkind: Service\nmetadata: &m {name: a, labels: &l {x: up}}\n---\napiVersion: v1\nkind: Service\nmetadata:\n  name: b\n  labels: {<<: &k {x: down}, x: up}\n  annotations: *k\n"
	for name, c := range map[string]struct {
		file, text string
		want       []string
	}{
		"nothing":            {"a.yaml", "", nil},
		"comments":           {"a.yaml", "# nothing\n---\n# more of it\n", nil},
		"null":               {"a.yml", "null\n", nil},
		"several documents":  {"a.yaml", mixed, []string{"Service shop/web 02", "EndpointSlice default/web-1 10", "Node /node-1 21", "Service default/none 24"}},
		"JSON with tabs":     {"a.json", tabbed, []string{"Node /a 05", "Service default/b/😀 06"}},
		"the same as YAML":   {"a.yaml", strings.ReplaceAll(tabbed, `\/\ud83d\ude00`, ""), []string{"Node /a 05", "Service default/b 06"}},
		"JSON in a row":      {"a.json", `{"apiVersion":"v1","kind":"Node","metadata":{"name":"a"}}` + "\n\n" + `{"apiVersion":"v1","kind":"Node","metadata":{"name":"b"}}`, []string{"Node /a 01", "Node /b 03"}},
		"anchors and merges": {"a.yaml", anchors, []string{"Service default/a 01", "Service default/b 05"}},
		"an empty List":      {"a.yaml", "apiVersion: v1\nkind: List\n", nil},
		"a Windows file":     {"a.yaml", "apiVersion: v1\r\nkind: Node\r\nmetadata:\r\n  name: a\r\n", []string{"Node /a 01"}},
	} {
		t.Run(name, func(t *testing.T) {
			objects, errs := Parse(c.file, []byte(c.text))
			if len(errs) > 0 {
				t.Errorf("errors %v, want none", errs)
			}
			if diff := cmp.Diff(c.want, places(t, objects)); diff != "" {
				t.Errorf("objects (-want +got):\n%s", diff)
			}
		})
	}
}

const service = "apiVersion: v1\nkind: Service\nmetadata:\n  name: a\n"

func TestErrorsNameFileLineAndField(t *testing.T) {
	slice := "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a}\nendpoints:\n- addresses: [10.0.0.1]\n- addresses: 10.0.0.2\n- addresses: [3]\n"
	for name, c := range map[string]struct {
		file, text string
		want       []string // prefixes of the errors
	}{
		"unknown field":       {"", service + "spec:\n  clusterIP: 10.0.0.1\n  prots: []\n", []string{"7: spec.prots: unknown field"}},
		"duplicate field":     {"", service + "spec:\n  clusterIP: a\n  clusterIP: b\n", []string{"7: spec.clusterIP: duplicate field"}},
		"case matters":        {"", service + "spec:\n  clusterip: a\n", []string{"6: spec.clusterip: unknown field"}},
		"wrong type":          {"", service + "spec:\n  ports:\n  - port: 80\n  - port: http\n", []string{"8: spec.ports[1].port: want a number (int32), got a string"}},
		"a number for a name": {"", "apiVersion: v1\nkind: Service\nmetadata:\n  name: 5\n", []string{"4: metadata.name: want a string, got a number"}},
		"a word that is true": {"", service + "  labels: {a: yes, b: \"no\"}\n", []string{"5: metadata.labels.a: want a string, got true or false"}},
		"a mapping too many":  {"", service + "spec:\n  ports: {port: 80}\n", []string{"6: spec.ports: want a list, got a mapping"}},
		"a list too many":     {"", service + "spec: [a]\n", []string{"5: spec: want a mapping, got a list"}},
		"too large":           {"", service + "spec:\n  ports:\n  - port: 99999999999\n", []string{"7: spec.ports[0].port: want a number (int32), got number 99999999999"}},
		"bad time":            {"", service + "  creationTimestamp: noon\n", []string{"5: metadata.creationTimestamp: parsing time"}},
		"bad union":           {"", service + "spec:\n  ports:\n  - port: 1\n    targetPort: 1\n  - port: 2\n    targetPort: {a: b}\n", []string{"10: spec.ports[1].targetPort: want a number (int32), got a mapping"}},
		"bad quantity":        {"", "apiVersion: v1\nkind: Node\nmetadata: {name: a}\nstatus:\n  capacity:\n    cpu: lots\n", []string{"6: status.capacity.cpu: quantities must match"}},
		"several":             {"", slice, []string{"6: endpoints[1].addresses: want a list, got a string", "7: endpoints[2].addresses[0]: want a string, got a number"}},
		"no name":             {"", "# x\n" + "apiVersion: v1\nkind: Service\n", []string{"2: metadata.name is missing"}},
		"no kind":             {"", "metadata:\n  name: a\n", []string{`1: want an object with apiVersion and kind, got apiVersion "" and kind ""`}},
		"a text":              {"", "hello\n", []string{"1: want an object with apiVersion and kind, got a scalar"}},
		"a List of texts":     {"", "apiVersion: v1\nkind: List\nitems:\n- a\n", []string{"4: want an object with apiVersion and kind, got a scalar"}},
		"a List that is none": {"", "apiVersion: v1\nkind: List\nitems: a\n", []string{"3: items: want a list, got a scalar"}},
		"a List's item":       {"", "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Service, metadata: {name: a},\n   spek: {}}\n", []string{"5: spek: unknown field"}},
		"field name":          {"", "apiVersion: v1\n[a]: b\n", []string{"2: the name of a field must be a string"}},
		"open list":           {"", service + "spec: [\n", []string{"5: did not find expected node content"}},
		"open list in front":  {"", "a: 1\nb: [\nc: 2\n", []string{"2: did not find expected ',' or ']'"}},
		"bad indentation":     {"", "a: 1\n  b: 2\n", []string{"2: mapping values are not allowed"}},
		"first line":          {"", "a: b: c\n", []string{"1: mapping values are not allowed"}},
		"tab":                 {"", "a:\n\tb: 2\n", []string{"2: found character that cannot start any token"}},
		"open quotes":         {"", "a: 1\nb: \"x\n\n\n", []string{"2: found unexpected end of stream"}},
		"second document":     {"", "---\n---\na: {\n", []string{"3: did not find expected node content"}},
		"control character":   {"", "a: 1\nb: \x01\n", []string{"2: control characters are not allowed"}},
		"no UTF-8":            {"", "a: 1\nb: \xff\n", []string{"2: invalid leading UTF-8 octet"}},
		"unknown anchor":      {"", "a: 1\nb: *x\n", []string{"2: unknown anchor 'x' referenced"}},
		"endless alias":       {"", "a: 1\nb: &x\n- *x\n", []string{`3: alias "x" refers to a value that contains it`}},
		"infinity":            {"", service + "  labels:\n    a: .inf\n", []string{`6: metadata.labels.a: read ".inf": json: unsupported value`}},
		"false number":        {"", service + "  labels:\n    a: !!int x\n", []string{`6: metadata.labels.a: read "x": cannot decode`}},
		"bad merge":           {"", "a: 1\n<<: b\n", []string{`2: "<<" wants a mapping`}},
		"laughs":              {"", laughs(), []string{"6: aliases expand to more than 65536 values"}},
		"JSON":                {"x.json", "{\n\"a\": 1,\n\"b\" 2}", []string{"3: invalid character '2' after object key"}},
		"JSON that ends":      {"x.json", "{\n\"a\": [1,\n\n", []string{"2: unexpected end of file"}},
		"JSON bracket":        {"x.json", "{\n\"a\": [1}\n}\n", []string{"2: invalid character '}' after array element"}},
		"JSON bracket alone":  {"x.json", "{\n\n]", []string{"3: invalid character ']'"}},
		"JSON open quotes":    {"x.json", "{\n\"a\": \"b\n}", []string{"2: invalid character '\\n' in string literal"}},
		"JSON far down":       {"x.json", "[" + strings.Repeat("[1,\n 2],\n", 5000) + "[1 2]]", []string{"10001: invalid character '2' after array element"}},
		"JSON string far":     {"x.json", "[" + strings.Repeat("[1,\n 2],\n", 5000) + "\"\n\"]", []string{"10001: invalid character '\\n' in string literal"}},
		"JSON number far":     {"x.json", "[" + strings.Repeat("[1,\n 2],\n", 5000) + "-\n]", []string{"10001: invalid character '\\n' in numeric literal"}},
		"JSON of YAML":        {"x.json", "a: 1\n", []string{"1: invalid character 'a'"}},
		"field of JSON":       {"x.json", "{\"apiVersion\": \"v1\", \"kind\": \"Node\", \"metadata\": {\n\t\"name\": \"a\",\n\t\"mane\": 1\n}}\n", []string{"3: metadata.mane: unknown field"}},
	} {
		t.Run(name, func(t *testing.T) {
			file := c.file
			if file == "" {
				file = "a.yaml"
			}
			objects, errs := Parse(file, []byte(c.text))
			if len(objects) > 0 || len(errs) != len(c.want) {
				t.Errorf("objects %v, errors %v, want no objects and errors %q", objects, errs, c.want)
			}
			for i, want := range c.want {
				if want = file + ":" + want; i < len(errs) && !strings.HasPrefix(errs[i].Error(), want) {
					t.Errorf("error %d = %q, want it to begin with %q", i, errs[i], want)
				}
			}
		})
	}
}

// laughs is a small file whose aliases expand to a huge one.
func laughs() string {
	text := "a0: &a0 [1,1,1,1,1,1,1,1]\n"
	for i := range 8 {
		from, to := string(rune('0'+i)), string(rune('1'+i))
		text += "a" + to + ": &a" + to + " [" + strings.TrimSuffix(strings.Repeat("*a"+from+",", 8), ",") + "]\n"
	}
	return text
}

func TestOtherKindsDoNotAffectTheRestOfTheFile(t *testing.T) {
	text := service + "---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: b}\nspec: {anything: goes}\n---\napiVersion: v1\nkind: Node\nmetadata: {name: c}\n"
	objects, errs := Parse("dir/a.yaml", []byte(text))
	if diff := cmp.Diff([]string{"Service default/a 01", "Node /c 11"}, places(t, objects)); diff != "" {
		t.Errorf("objects (-want +got):\n%s", diff)
	}
	if len(errs) != 1 || !errors.Is(errs[0], ErrKind) || !strings.HasPrefix(errs[0].Error(), `dir/a.yaml:6: apiVersion "apps/v1", kind "Deployment": want`) {
		t.Errorf("errors %v, want one ErrKind at dir/a.yaml:6", errs)
	}
}

func TestDocumentsBeforeASyntaxErrorAreRead(t *testing.T) {
	objects, errs := Parse("a.yaml", []byte(service+"---\nspec: [\n---\n"+service))
	if got := places(t, objects); len(got) != 1 || len(errs) != 1 || errors.Is(errs[0], ErrKind) {
		t.Errorf("objects %v, errors %v, want the first Service and one error that is no ErrKind", got, errs)
	}
}

func TestErrorsOfAnObjectAreBounded(t *testing.T) {
	text := service + "spec:\n" + strings.Repeat("  x: 1\n", 50)
	if _, errs := Parse("a.yaml", []byte(text)); len(errs) != mostFaults {
		t.Errorf("%d errors, want %d", len(errs), mostFaults)
	}
}

func TestDefaults(t *testing.T) {
	text := `
apiVersion: v1
kind: Service
metadata: {name: dual}
spec: {clusterIPs: [10.0.0.1, "fd00::1"], type: NodePort, sessionAffinity: ClientIP, ports: [{port: 53, protocol: UDP}, {port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: headless}
spec: {clusterIP: None}
---
apiVersion: v1
kind: Service
metadata: {name: alias}
spec: {type: ExternalName, externalName: example.org}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s}
addressType: IPv4
ports: [{port: 80}, {name: p, protocol: SCTP, port: 81}]
`
	got, errs := Parse("a.yaml", []byte(text))
	if len(errs) > 0 || len(got) != 4 {
		t.Fatalf("%d objects, errors %v, want 4 and none", len(got), errs)
	}
	cluster := new(v1.ServiceInternalTrafficPolicyCluster)
	want := []Value{
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "dual", Namespace: "default"}, Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeNodePort, ClusterIP: "10.0.0.1", ClusterIPs: []string{"10.0.0.1", "fd00::1"},
			IPFamilies:      []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
			SessionAffinity: v1.ServiceAffinityClientIP,
			SessionAffinityConfig: &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{
				TimeoutSeconds: new(int32(10800)),
			}},
			InternalTrafficPolicy: cluster, ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyCluster,
			Ports: []v1.ServicePort{
				{Port: 53, Protocol: v1.ProtocolUDP, TargetPort: intstr.FromInt32(53)},
				{Port: 80, Protocol: v1.ProtocolTCP, TargetPort: intstr.FromInt32(80)},
			},
		}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "headless", Namespace: "default"}, Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: "None", ClusterIPs: []string{"None"},
			SessionAffinity: v1.ServiceAffinityNone, InternalTrafficPolicy: cluster,
		}},
		&v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "alias", Namespace: "default"}, Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeExternalName, ExternalName: "example.org", SessionAffinity: v1.ServiceAffinityNone,
		}},
		&discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "s", Namespace: "default"}, AddressType: discovery.AddressTypeIPv4,
			Ports: []discovery.EndpointPort{
				{Name: new(""), Protocol: new(v1.ProtocolTCP), Port: new(int32(80))},
				{Name: new("p"), Protocol: new(v1.ProtocolSCTP), Port: new(int32(81))},
			},
		},
	}
	for i, o := range got {
		o.Value.GetObjectKind().SetGroupVersionKind(want[i].GetObjectKind().GroupVersionKind())
		if diff := cmp.Diff(want[i], o.Value); diff != "" {
			t.Errorf("object %d (-want +got):\n%s", i, diff)
		}
	}
}

func TestNamesOfManifests(t *testing.T) {
	for file, want := range map[string]bool{
		"a.yaml": true, "a.yml": true, "a.json": true, "dir/a.b.yaml": true,
		"a.yaml~": false, "a.yaml.swp": false, "yaml": false, "a.YAML": false, "": false,
	} {
		if got := IsName(file); got != want {
			t.Errorf("IsName(%q) = %v, want %v", file, got, want)
		}
	}
}

// FuzzParse: no file causes a panic, and the lines of objects and errors exist.
func FuzzParse(f *testing.F) {
	f.Add(mixed, false)
	f.Add(service+"spec: {ports: [{port: a}], x: 1}\n", false)
	f.Add("a: &x [*x]\n<<: {b: c}\n? [d]\n", false)
	f.Add(laughs(), false)
	f.Add("{\"apiVersion\": \"v1\",\n\"kind\": \"Node\", \"metadata\": {\"name\": 1, \"creationTimestamp\": 2}}", true)
	files, _ := filepath.Glob("../../examples/quickstart/cluster/*.yaml")
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil {
			f.Add(string(text), false)
		}
	}
	f.Fuzz(func(t *testing.T, text string, asJSON bool) {
		file := "a.yaml"
		if asJSON {
			file = "a.json"
		}
		lines := 1
		for _, end := range []string{"\n", "\r", "\u0085", "\u2028", "\u2029"} { // YAML 1.1, section 4.1.4
			lines += strings.Count(text, end)
		}
		objects, errs := Parse(file, []byte(text))
		for _, o := range objects {
			if o.Line < 1 || o.Line > lines || o.Value.GetName() == "" {
				t.Errorf("object %q in line %d of %d", o.Value.GetName(), o.Line, lines)
			}
		}
		for _, err := range errs {
			if err.Line < 1 || err.Line > lines || !strings.HasPrefix(err.Error(), file+":") {
				t.Errorf("error %q in line %d of %d", err, err.Line, lines)
			}
		}
	})
}

// FuzzDecode compares accepted texts, and the objects made of them, with sigs.k8s.io/json,
// which the API server uses.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		`null`, `[]`, `{"Kind": "Service"}`, `{"kind": null, "kind": "Service"}`, `{"metadata": {"name": 1}}`, `{"metadata": []}`, `{"-": 1, "": 2}`,
		`{"metadata": {"labels": {"a": "b", "c": null}, "creationTimestamp": "2024-01-02T03:04:05Z", "managedFields": [{"fieldsV1": {"f:a": [1, {}]}}, null]}}`,
		`{"spec": {"ports": [{"port": 1e2, "targetPort": "x"}, {"port": 1.0}, {"port": 99999999999}, {"targetPort": {}}], "clusterIPs": null, "sessionAffinityConfig": {"clientIP": {}}}}`,
		`{"addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": true, "serving": "yes"}}]}`,
		`{"status": {"capacity": {"cpu": "1", "memory": 5, "x": {}}, "addresses": {}}, "spec": {"podCIDRs": ["a", 1, null]}}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		documents, broken := readJSON([]byte(text))
		if broken != nil || len(documents) != 1 {
			return
		}
		for _, pair := range [][2]Value{{&v1.Service{}, &v1.Service{}}, {&v1.Node{}, &v1.Node{}}, {&discovery.EndpointSlice{}, &discovery.EndpointSlice{}}} {
			got, want := pair[0], pair[1]
			faults := decode(documents[0], got)
			refused, err := strict.UnmarshalStrict([]byte(text), want)
			if (len(faults) == 0) != (err == nil && len(refused) == 0) {
				t.Errorf("%T: faults %v; sigs.k8s.io/json has %v, %v", got, faults, err, refused)
			}
			want.SetManagedFields(nil) // which hold JSON as it was written
			got.SetManagedFields(nil)
			if diff := cmp.Diff(want, got); diff != "" && len(faults) == 0 {
				t.Errorf("%T (-sigs.k8s.io/json +ours):\n%s", got, diff)
			}
		}
	})
}
