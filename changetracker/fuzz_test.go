package changetracker

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"time"
	"unicode/utf8"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// filler makes objects from bytes: every pointer may be nil, every list short and every
// string malformed. It needs no valid JSON, so that the fuzzer reaches deep code quickly.
type filler struct{ data []byte }

func (f *filler) next() byte {
	if len(f.data) == 0 {
		return 0
	}
	b := f.data[0]
	f.data = f.data[1:]
	return b
}

func (f *filler) text() string {
	texts := []string{
		"", "default", "web", "10.0.0.1", "10.0.0.2", "fd00::1", "010.0.0.1", " 10.0.0.3 ", "::ffff:10.0.0.4", "None",
		"0.0.0.0", "::", "224.0.0.1", "fe80::1%eth0", "10.0.0.0/8", "10.0.0.0/08", "0.0.0.0/0", "fd00::/8", "::/0",
		"::ffff:10.0.0.0/104", "::ffff:0:0/90", "10.0.0.1/33", "garbage", "\xff\xfe", "TCP", "UDP", "IPv4", "IPv6",
		"FQDN", "Local", "ClientIP", "LoadBalancer", "NodePort", "ClusterIP", "ExternalName", "VIP", "Proxy", "n0",
		"2100-01-01T00:00:00Z", discovery.LabelServiceName, LabelServiceProxyName, v1.EndpointsLastChangeTriggerTime,
	}
	return texts[int(f.next())%len(texts)]
}

// fill sets values of the types that the trackers read. Others stay empty.
func (f *filler) fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if f.next()%4 != 0 {
			v.Set(reflect.New(v.Type().Elem()))
			f.fill(v.Elem())
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[metav1.Time]() {
			v.Set(reflect.ValueOf(metav1.NewTime(time.Unix(int64(f.next()%3), 0))))
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).Name != "ManagedFields" {
				f.fill(v.Field(i))
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), int(f.next()%4), 4))
		for i := range v.Len() {
			f.fill(v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range f.next() % 3 {
			key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			f.fill(key)
			f.fill(value)
			v.SetMapIndex(key, value)
		}
	case reflect.String:
		v.SetString(f.text())
	case reflect.Bool:
		v.SetBool(f.next()%2 == 1)
	case reflect.Int32, reflect.Int64, reflect.Int:
		v.SetInt([]int64{0, 1, 80, 8080, 65535, 65536, -1, 1<<31 - 1}[f.next()%8])
	default:
		return
	}
}

// objectsFrom reads the bytes as JSON, if they are valid, and with a filler.
func objectsFrom[T any](data []byte) []*T {
	var objects []*T
	fromJSON := new(T)
	if json.Unmarshal(data, fromJSON) == nil {
		objects = append(objects, fromJSON)
	}
	filled := new(T)
	(&filler{data: data}).fill(reflect.ValueOf(filled).Elem())
	return append(objects, filled)
}

// checkCanonical checks the content of a tracker against the documentation of its types.
func checkCanonical(t *testing.T, tracker *Tracker) {
	t.Helper()
	for _, family := range bothFamilies() {
		state, _ := applyAll(t, tracker, family)
		for name, p := range state.All() {
			again := p.clone()
			if err := again.canonicalise(1); err != nil || !again.Equal(p) || p.Family != family || p.Name != name {
				t.Errorf("service port is not canonical (%v):\n%+v", err, p)
			}
		}
		for _, service := range state.services.All() {
			for _, p := range service.ports {
				checkEndpoints(t, family, p)
			}
		}
		if err := checkState(state); err != nil {
			t.Error(err)
		}
	}
	for _, p := range tracker.Problems() {
		if len(p.Value) > maxValueBytes || !utf8.ValidString(p.Value) || p.Field == "" || p.Object == "" || p.Reason == "" {
			t.Errorf("problem = %+q", p)
		}
	}
}

func checkEndpoints(t *testing.T, family v1.IPFamily, p *portState) {
	t.Helper()
	var last netip.AddrPort
	for _, e := range p.endpoints.Slice() {
		a := e.Addr.Addr()
		if !dialable(a) || a.Is4In6() || familyOf(a) != family || e.Addr.Port() == 0 || !validProtocol(p.name.Protocol) {
			t.Errorf("%v: endpoint %v", p.name, e)
		}
		if last.IsValid() && last.Compare(e.Addr) >= 0 {
			t.Errorf("%v: %v is not after %v", p.name, e.Addr, last)
		}
		last = e.Addr
		for _, hints := range [][]string{e.ZoneHints, e.NodeHints} {
			if hints != nil && (len(hints) == 0 || !slices.Equal(hints, canonicalNames(slices.Clone(hints)))) {
				t.Errorf("%v: hints %q", p.name, hints)
			}
		}
	}
}

func FuzzService(f *testing.F) {
	for _, s := range []*v1.Service{{}, webService(), webService(func(s *v1.Service) {
		s.Spec.ExternalIPs, s.Spec.LoadBalancerSourceRanges = []string{"x", "192.0.2.1"}, []string{"10.0.0.0/8"}
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "192.0.2.2"}}
	})} {
		data, err := json.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte("\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, s := range objectsFrom[v1.Service](data) {
			tracker := mustTracker(t, func(o *Options) { o.StrictSourceRanges = len(data)%2 == 0 })
			before := s.DeepCopy()
			tracker.Services.Update(nil, s)
			checkCanonical(t, tracker)
			if !reflect.DeepEqual(s, before) {
				t.Errorf("the Service was changed:\n%v\nfrom\n%v", s, before)
			}
			if tracker.Services.Update(s, s) {
				t.Error("the same again is a change")
			}
			tracker.Services.Update(s, nil)
			checkEmpty(t, tracker)
		}
	})
}

func checkEmpty(t *testing.T, tracker *Tracker) {
	t.Helper()
	for _, family := range bothFamilies() {
		applyAll(t, tracker, family)
	}
	if got, want := sizes(tracker), sizes(mustTracker(t)); got != want {
		t.Errorf("left behind: %s\nwant %s", got, want)
	}
}

func FuzzEndpointSlice(f *testing.F) {
	full := webSlice("a", at("10.0.0.1", onNode("here"), conditions(true, true, false)), at("x"), at("fd00::1"))
	full.Ports = append(full.Ports, endpointPort("dns", "UDP", 53), discovery.EndpointPort{})
	for _, s := range []*discovery.EndpointSlice{{}, full, annotated(webSlice("b", at("10.0.0.1")), time.Unix(1<<33, 0))} {
		data, err := json.Marshal(s)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte("\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b"))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, s := range objectsFrom[discovery.EndpointSlice](data) {
			// The filler seldom sets these three to valid values, which most code needs.
			if len(data)%4 != 0 {
				s.Namespace, s.Name, s.Labels = "default", "a", map[string]string{discovery.LabelServiceName: "web"}
				s.AddressType = []discovery.AddressType{discovery.AddressTypeIPv4, discovery.AddressTypeIPv6}[len(data)%2]
			}
			tracker := mustTracker(t)
			other := created(webSlice("other", at("10.0.0.1", conditions(false, true, true)), at("10.0.0.9")), 1)
			tracker.Endpoints.EndpointSliceUpdate(other, false)
			before := s.DeepCopy()
			tracker.Endpoints.EndpointSliceUpdate(s, false)
			checkCanonical(t, tracker)
			if !reflect.DeepEqual(s, before) {
				t.Errorf("the slice was changed:\n%v\nfrom\n%v", s, before)
			}
			if tracker.Endpoints.EndpointSliceUpdate(s, false) {
				t.Error("the same again is a change")
			}
			tracker.Endpoints.EndpointSliceUpdate(s, true)
			tracker.Endpoints.EndpointSliceUpdate(other, true)
			checkEmpty(t, tracker)
		}
	})
}

// FuzzAddresses: addresses and ranges are canonical, so what was read is read again as the
// same, and a range holds the address that it is written with.
func FuzzAddresses(f *testing.F) {
	for _, text := range []string{"10.0.0.1", "010.000.0.1", " fd00::1 ", "::ffff:10.0.0.1", "10.0.0.1/8", "::ffff:10.0.0.0/104", "fe80::1%eth0", "::ffff:0:0/90", "1.2.3.4/033"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if a, ok := ParseAddr(text); ok {
			if again, ok := ParseAddr(a.String()); !ok || again != a || a.Is4In6() {
				t.Errorf("%q is %v, which is %v, %v", text, a, again, ok)
			}
		}
		if p, ok := ParseRange(text); ok {
			if again, ok := ParseRange(p.String()); !ok || again != p || p != p.Masked() {
				t.Errorf("%q is %v, which is %v, %v", text, p, again, ok)
			}
		}
	})
}
