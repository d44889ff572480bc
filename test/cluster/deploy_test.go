//go:build cluster

package cluster

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

const deploy = "../../deploy"

// deployedRole is the ClusterRole in deploy/.
func deployedRole(t *testing.T) *rbacv1.ClusterRole {
	t.Helper()
	text := must.Read(t, filepath.Join(deploy, "kustomize/base/rbac.yaml"))
	first, _, _ := strings.Cut(string(text), "\n---\n")
	role := &rbacv1.ClusterRole{}
	must.OK(t, yaml.UnmarshalStrict([]byte(first), role))
	return role
}

// TestDeploy applies the manifests of deploy/ to the real API server as a dry run,
// and runs the program with exactly the rights that they grant.
func TestDeploy(t *testing.T) {
	w := setUp(t)
	w.admin.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	w.namespace = "n"
	w.bind()
	for folder, name := range map[string]string{"base": "sluice", "replace-kube-proxy": "sluice", "beside": "sluice-beside"} {
		t.Run("dry run of "+folder, func(t *testing.T) {
			out, err := w.kubectl(t, "apply", "--dry-run=server", "--validate=strict", "-k", filepath.Join(deploy, "kustomize", folder)).CombinedOutput()
			if err != nil || !strings.Contains(string(out), "daemonset.apps/"+name+" created (server dry run)") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	testChart(t, w)
	t.Run("rights", func(t *testing.T) { testRights(t, w) })
	t.Run("rights of kube-proxy", func(t *testing.T) { testKubeProxysRights(t, w) })
	t.Run("configuration of kube-proxy", func(t *testing.T) { testKubeProxysConfiguration(t, w) })
	t.Run("container", func(t *testing.T) { testContainer(t, w) })
	t.Run("a change of the configuration of kube-proxy", func(t *testing.T) { testConfigurationChanges(t, w) })
	t.Run("no other proxy", func(t *testing.T) { testNoOtherProxy(t, w) })
	t.Run("ports", func(t *testing.T) { testPortsTaken(t, w) })
}

// testKubeProxysRights runs the program as a replacement for kube-proxy, with the
// rights of kube-proxy's user and only its kubeconfig. Nothing may be forbidden,
// and the log may contain no warning.
func testKubeProxysRights(t *testing.T, w *world) {
	w.t, w.admin.t = t, t
	name := "sluice-as-kube-proxy"
	cmd := w.start(name, os.Getenv("SLUICE_BIN"), "run", "--kubeconfig", w.kubeconfig("system:kube-proxy"), "--hostname-override", "node2", "-v", "4")
	w.awaitProxy()
	w.until("its event has arrived", func() error {
		if !w.hasEvent("node2") {
			return errNotYet
		}
		return nil
	})
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node"}}
	w.admin.read(node)
	node.Labels["changed"] = "yes" // all nodes are watched: the Service keyed still exists
	w.admin.update(node)
	w.wantMetric("sluice_kubernetes_connected 1")
	_ = cmd.Process.Signal(os.Interrupt)
	_ = cmd.Wait()
	w.wantNoAlarm(name)
}

// wantNoAlarm expects no warning and no error in a program's log.
func (w *world) wantNoAlarm(name string) {
	w.t.Helper()
	for line := range strings.Lines(w.said(name)) {
		for _, alarm := range []string{"forbidden", "level=warn", "level=error", " WRN ", " ERR "} {
			if strings.Contains(line, alarm) {
				w.t.Errorf("it says: %s", line)
			}
		}
	}
}

// right is one verb on one resource.
type right struct{ group, resource, verb string }

func rights(role *rbacv1.ClusterRole) []right {
	var all []right
	for _, rule := range role.Rules {
		for _, resource := range rule.Resources {
			for _, verb := range rule.Verbs {
				all = append(all, right{rule.APIGroups[0], resource, verb})
			}
		}
	}
	return all
}

// grant creates or replaces a role with these rights for the user sluice.
func (w *world) grant(all []right) {
	w.t.Helper()
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "sluice"}}
	for _, r := range all {
		role.Rules = append(role.Rules, rbacv1.PolicyRule{APIGroups: []string{r.group}, Resources: []string{r.resource}, Verbs: []string{r.verb}})
	}
	if err := w.admin.tryUpdate(role); err != nil { // this creates it too
		w.t.Fatal(err)
	}
}

// bind gives the user sluice the role of that name.
func (w *world) bind() {
	w.t.Helper()
	w.admin.create(&rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "sluice"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "sluice"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "sluice"}},
	})
}

// testRights expects that nothing is forbidden with the deployed role, and that
// something is with each of its rights removed. Clients now list by watching, so
// the right to list is tested with a program that lists the old way, as with an
// older API server.
func testRights(t *testing.T, w *world) {
	w.t, w.admin.t = t, t
	all := rights(deployedRole(t))
	w.service("keyed", func(s *corev1.Service) {
		s.Annotations = map[string]string{"sluice.dev/topology-keys": "kubernetes.io/hostname,*"}
	})
	try := func(name string, granted []right, oldWay bool) string {
		w.grant(granted)
		for _, r := range all { // the authorizer reads roles from a cache
			w.until("the rights are in force", func() error {
				review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: "sluice",
					ResourceAttributes: &authorizationv1.ResourceAttributes{Group: r.group, Resource: r.resource, Verb: r.verb}}}
				w.admin.create(review)
				if review.Status.Allowed != slices.Contains(granted, r) {
					return errNotYet
				}
				return nil
			})
		}
		program := "sluice-" + name
		cmd := w.startWith(program, oldWay, "run", "--kubeconfig", w.kubeconfig("sluice"), "--hostname-override", "node", "--access-log", "off",
			"--datapath=relay", "--healthz-port=0", "--metrics-port=0", "-v", "4") // kernel flows ask the API server nothing
		defer func() {
			_ = cmd.Process.Signal(os.Interrupt)
			_ = cmd.Wait()
		}()
		whole := len(granted) == len(all)
		w.until(name+": it is ready with all rights, or something is forbidden", func() error {
			said := w.said(program)
			if strings.Contains(said, "forbidden") || whole && strings.Contains(said, " ready ") && w.hasEvent("node") {
				return nil
			}
			return errNotYet
		})
		return w.said(program)
	}
	if said := try("all", all, false); strings.Contains(said, "forbidden") {
		t.Errorf("with the deployed role:\n%s", said)
	}
	for i, taken := range all {
		name := strings.Join([]string{"no", taken.verb, taken.resource}, "-")
		try(name, slices.Delete(slices.Clone(all), i, i+1), taken.verb == "list")
	}
}

type notYet struct{}

func (notYet) Error() string { return "not yet" }

var errNotYet = notYet{}

// startWith starts sluice on the node; oldWay makes it list the old way.
func (w *world) startWith(name string, oldWay bool, args ...string) *netns.Cmd {
	w.t.Helper()
	bin := os.Getenv("SLUICE_BIN")
	if oldWay {
		env := must.Get(exec.LookPath("env"))(w.t)
		return w.start(name, env, append([]string{"KUBE_FEATURE_WatchListClient=false", bin}, args...)...)
	}
	return w.start(name, bin, args...)
}

// hasEvent tells whether the API has the event of a start on a node.
func (w *world) hasEvent(node string) bool {
	return slices.ContainsFunc(w.events("default"), func(e corev1.Event) bool {
		return e.Reason == "Starting" && e.InvolvedObject.Kind == "Node" && e.InvolvedObject.Name == node
	})
}

// events returns those of a namespace.
func (w *world) events(namespace string) []corev1.Event {
	list := &corev1.EventList{}
	must.OK(w.t, w.admin.clients[corev1.SchemeGroupVersion].Get().Namespace(namespace).Resource("events").Do(ctx).Into(list))
	return list.Items
}
